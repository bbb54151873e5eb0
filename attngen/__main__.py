"""`python -m attngen`: the command of cli/main.py."""

from __future__ import annotations

from .cli.main import main

if __name__ == "__main__":
    main(prog_name="attngen")
