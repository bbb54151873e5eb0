"""A bundle as a package: a wheel with the bundle, and an entry point by which calls find it."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from pathlib import Path

from .. import __version__
from ..errors import BundleError
from ..io.files import replacing
from .bundle import Bundle
from .lookup import GROUP
from .writer import plain_member

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")
_GENERATOR = b"Generator: attngen\n"
_INIT = '''"""Prebuilt attention kernels, found by attngen through this package's entry point."""

from pathlib import Path


def path() -> Path:
    """Of the bundle."""
    return Path(__file__).with_name("kernels.attn")
'''


def make_wheel(bundle: Bundle, name: str, version: str, folder: Path) -> Path:
    """Writes the wheel of a bundle, the same bytes for the same bundle, and returns its path.

    name, version: as the package index would take them. Raises: BundleError; OSError,
    also where a wheel of that name is another's.
    """
    reasons = []
    module = re.sub(r"[-_.]+", "_", name).lower()
    if module == "attngen":
        reasons.append("the package would take the place of attngen itself: name it otherwise")
    if not _NAME.fullmatch(name):
        reasons.append(f"{name!r} is no name of a package: letters, digits, and .-_ between them")
    if not _VERSION.fullmatch(version):
        reasons.append(f"{version!r} is no version of a package, such as 1.0.2")
    if reasons:
        raise BundleError(reasons)
    info = f"{module}-{version}.dist-info"
    arches = sorted({arch for _, arch in bundle.problems})
    files = {
        f"{module}/__init__.py": _INIT.encode(),
        f"{module}/kernels.attn": bundle.data(),
        f"{info}/METADATA": _metadata(name, version, arches).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\n" + _GENERATOR + b"Root-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{GROUP}]\n{module} = {module}:path\n".encode(),
    }
    lines = [f"{path},sha256={_record_digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as wheel:
        for path, data in files.items():
            wheel.writestr(plain_member(path), data)
    target = folder / f"{module}-{version}-py3-none-any.whl"
    with replacing(target, _is_ours, "wheel of attngen's") as file:
        file.write(archive.getvalue())
    return target


def _is_ours(path: Path) -> bool:
    """Whether a wheel was made here, of whatever bundle."""
    try:
        with zipfile.ZipFile(path) as wheel:
            infos = [
                each for each in wheel.infolist() if each.filename.endswith(".dist-info/WHEEL")
            ]
            return len(infos) == 1 and _GENERATOR in wheel.open(infos[0]).read(1000)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError):
        return False


def _metadata(name: str, version: str, arches: list[str]) -> str:
    return (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        f"Summary: Prebuilt attngen attention kernels for {', '.join(arches)}\n"
        f"Requires-Dist: attngen>={__version__}\n"
    )


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
