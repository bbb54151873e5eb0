"""Presets: the attention of well-known models as spec files, each with its source.

A file `presets/<model>.toml` has `[[kernel]]` tables alone, so that several make one spec file. Its
first line says what the model has; `# Source:` lines, where that is written down. What no kernel
serves yet is in it all the same: building it says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import SpecError
from ..io.text import suggestion

FOLDER = Path(__file__).resolve().parent / "presets"


def names() -> list[str]:
    """The names of all models, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def summary(name: str) -> str:
    """The first line of a model's file."""
    return text([name]).partition("\n")[0].removeprefix("# ")


def text(wanted: Iterable[str]) -> str:
    """One spec file of these models, each once; `gemma3` means every `gemma3-…`.

    Raises: SpecError with every unknown name.
    """
    known = names()
    chosen: dict[str, None] = {}
    unknown = []
    for name in wanted:
        meant = [each for each in known if each == name or each.startswith(f"{name}-")]
        chosen.update(dict.fromkeys(meant))
        if not meant:
            all_ = f"there are: {', '.join(known)}{suggestion(name, known)}"
            unknown.append(f"no preset is named {name!r}; {all_}")
    if unknown:
        raise SpecError(unknown)
    return "\n".join((FOLDER / f"{name}.toml").read_text(encoding="utf-8") for name in chosen)
