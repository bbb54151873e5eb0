"""Trust: whose files on a shared disk are used, as a kernel runs with all rights of its process.

Trusted are this process's user, root, and the users whose ids ATTNGEN_TRUSTED_UIDS lists, with
commas between them; and of their files and directories only what nobody else may write to.
"""

from __future__ import annotations

import os
import stat

from ..errors import CacheError
from .text import quoted

VARIABLE = "ATTNGEN_TRUSTED_UIDS"


def trusted_uids() -> frozenset[int]:
    """The users whose files are used. Raises: CacheError where the environment names no ids."""
    named = os.environ.get(VARIABLE, "").replace(",", " ").split()
    if wrong := [word for word in named if not word.isdecimal() or len(word) > 10]:
        raise CacheError(
            f"{VARIABLE} has {', '.join(map(quoted, wrong))}; allowed: numbers of users with "
            "commas between them, as 1000,1001 (`id -u NAME` prints one)"
        )
    return frozenset({0, os.geteuid(), *map(int, named)})


def distrust(status: os.stat_result, *, sticky: bool = False) -> str | None:
    """Why a file or directory is not used, as the end of a sentence about it; None where it is.

    sticky: whether a directory like /tmp will do, to which anyone may add, but in which nobody
    replaces what is another's.
    Raises: as `trusted_uids`.
    """
    if status.st_uid not in trusted_uids():
        return (
            f"belongs to user {status.st_uid}, who is not trusted: name the user in {VARIABLE}, "
            "or use another directory"
        )
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not others or (sticky and status.st_mode & stat.S_ISVTX):
        return None
    who = "anyone" if others & stat.S_IWOTH else "its group"
    return f"may be written to by {who}: take that right away (chmod -R go-w), or use another"
