"""Lists of what does not keep to a rule of the house yet: they may only shrink."""

from __future__ import annotations

from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "unit" / "house" / "exceptions"


def check(rule: str, found: set[str]) -> None:
    """Compare what breaks a rule with the lines of its list, `exceptions/<rule>.txt`.

    Raises: AssertionError naming what breaks the rule without being listed, and what is listed
    though it keeps to the rule by now.
    """
    path = FOLDER / f"{rule}.txt"
    listed = set(path.read_text().splitlines()) if path.exists() else set()
    fresh, stale = sorted(found - listed), sorted(listed - found)
    assert not fresh, f"{len(fresh)} break the rule of {rule}:\n" + "\n".join(fresh)
    name = path.relative_to(ROOT)
    assert not stale, f"{name}: delete lines of what keeps to the rule now:\n" + "\n".join(stale)
