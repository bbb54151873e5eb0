"""`python -m attngen`: the command of cli.py."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main(prog_name="attngen")
