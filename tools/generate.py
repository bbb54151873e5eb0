"""Write generated/: the rendered source and plan of each curated variant, and a manifest.

A change to a template, a header or a heuristic shows here as a diff of what it generates.
`python tools/generate.py --check` writes nothing and exits 1 on any difference.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from attngen.compiler import (  # noqa: E402  # the path above serves a checkout that is not installed
    batch,
)
from attngen.compiler.builder import render_problem  # noqa: E402
from attngen.io.values import to_data, to_json  # noqa: E402
from attngen.spec.attention_spec import load_specs  # noqa: E402

SPEC = ROOT / "examples" / "specs" / "curated.toml"
SCHEMA_VERSION = 1
DIFF_LINES = 40


def generate(spec: Path = SPEC) -> dict[str, str]:
    """The contents of generated/, file name → text.

    Files are named without the digest of the kernel's entry, so that a change is a diff and not
    a new file; the manifest has the entry and the digests.
    """
    jobs, refused = batch.jobs_of(load_specs(spec), None)
    if refused:
        raise refused[0]
    contents: dict[str, str] = {}
    kernels = {}
    for job in jobs:
        source, name = render_problem(job.problem, job.plan), job.name
        if name in kernels:
            raise ValueError(f"{spec}: two kernels are named {name}")
        contents[f"{name}.cu"] = source.text
        contents[f"{name}.plan.json"] = to_json(job.plan, indent=2) + "\n"
        kernels[name] = {
            "arch": job.arch,
            "entry": source.kernel.entry,
            "plan_sha256": _sha256(contents[f"{name}.plan.json"]),
            "problem": to_data(job.problem),
            "source_sha256": source.sha256,
            "specs": list(job.titles),
        }
    manifest = {"schema": SCHEMA_VERSION, "spec": spec.name, "kernels": kernels}
    contents["manifest.json"] = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    return contents


def read(folder: Path) -> dict[str, str]:
    """The files that lie in the folder."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*")) if path.is_file()}


def differences(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """List files that are missing, superfluous or different, these with the start of a diff."""
    lines = [f"missing: {name}" for name in sorted(wanted.keys() - found.keys())]
    lines += [f"superfluous: {name}" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(found.keys() & wanted.keys()):
        if found[name] != wanted[name]:
            diff = difflib.unified_diff(
                found[name].splitlines(), wanted[name].splitlines(), name, "now", lineterm="", n=1
            )
            lines += [f"differs: {name}", *itertools.islice(diff, DIFF_LINES)]
    return lines


def write(folder: Path, contents: dict[str, str]) -> None:
    """Make the folder hold exactly these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in read(folder).keys() - contents.keys():
        (folder / name).unlink()
    for name, text in contents.items():
        (folder / name).write_text(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if it differs")
    parser.add_argument("--output", type=Path, default=ROOT / "generated", help="folder")
    options = parser.parse_args(arguments)
    contents = generate()
    if not options.check:
        write(options.output, contents)
        print(f"{len(contents)} files in {options.output}")
        return 0
    lines = differences(read(options.output), contents)
    if lines:
        print("\n".join([*lines, "run `make generated` and commit what it writes"]))
    return 1 if lines else 0


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
