"""Summarises a run of the GPU tests as JSON: counts, failures, and what they ran on.

    python -m pytest -m gpu --junit-xml report.xml
    python tools/gpu_results.py --junit report.xml -o docs/results/gpu-tests.json

Several reports, of one run in parts, count as one; --by-function adds what each function's cases
came to.

Run it on the machine and the checkout that ran the tests: chip, versions and the digests of the
kernels' sources are those it finds. docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attngen.bench.machine import describe_machine  # noqa: E402  # a checkout not installed, too
from attngen.io.values import to_data  # noqa: E402

SCHEMA = 1
OUTCOMES = ("passed", "failed", "errors", "skipped")
_SUMMARY = re.compile(r"^=+\s*(?P<kind>RACECHECK|ERROR|LEAK)?\s*SUMMARY:\s*(?P<text>.+?)\s*$")
_COUNTS = {
    "ERROR": re.compile(r"^(\d+) errors?\b"),
    "RACECHECK": re.compile(r"^(\d+) hazards? displayed"),
    "LEAK": re.compile(r"leaked in (\d+) allocations?"),
}


class ReportError(ValueError):
    """A report that says nothing, or not what it should."""


def summarise_junit(*paths: Path, by_function: bool = False) -> dict[str, Any]:
    """Counts of junit files, names and messages of what failed, reasons of what was skipped.

    A test that fails and whose teardown fails as well counts once, as failed.
    Raises: ReportError where a file is no junit report, or holds no test.
    """
    cases: dict[str, dict[str, str | None]] = {}
    seconds = 0.0
    for path in paths:
        root = _report(path)
        for case in root.iter("testcase"):
            outcomes = cases.setdefault(_name(case), {})
            for kind in ("failure", "error", "skipped"):
                if (element := case.find(kind)) is not None:
                    outcomes[kind] = element.get("message")
        suites = [root] if root.tag == "testsuite" else root.findall("testsuite")
        seconds += sum(float(suite.get("time") or 0) for suite in suites)
    count = Counter(_outcome(outcomes) for outcomes in cases.values())
    wrong = {
        name: _first_line(outcomes.get("failure") or outcomes.get("error"))
        for name, outcomes in cases.items()
        if _outcome(outcomes) in ("failed", "errors")
    }
    reasons = Counter(
        _first_line(outcomes["skipped"])
        for outcomes in cases.values()
        if _outcome(outcomes) == "skipped"
    )
    return {
        **{name: count[name] for name in OUTCOMES},
        "seconds": round(seconds, 1),
        "failures": wrong,
        "skip_reasons": dict(sorted(reasons.items())),
        **({"functions": _of_functions(cases)} if by_function else {}),
    }


def _report(path: Path) -> ElementTree.Element:
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ReportError(f"{path}: {error}") from error
    if root.find(".//testcase") is None:
        raise ReportError(f"{path}: no test in it")
    return root


def _of_functions(cases: dict[str, dict[str, str | None]]) -> dict[str, dict[str, int]]:
    """How the cases of each function ended, by its name."""
    counts: dict[str, Counter[str]] = {}
    for name, outcomes in sorted(cases.items()):
        function = name.partition("[")[0].rpartition("::")[2]
        counts.setdefault(function, Counter())[_outcome(outcomes)] += 1
    return {name: {x: count[x] for x in OUTCOMES if count[x]} for name, count in counts.items()}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _outcome(outcomes: dict[str, str | None]) -> str:
    for kind, name in (("failure", "failed"), ("error", "errors"), ("skipped", "skipped")):
        if kind in outcomes:
            return name
    return "passed"


def _first_line(message: str | None) -> str:
    return (message or "").strip().partition("\n")[0][:200]


def summarise_sanitizer(path: Path) -> dict[str, Any]:
    """The summary lines of one compute-sanitizer log, and their counts added up.

    Raises: ReportError where there is none: the tool did not get to its end.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ReportError(f"{path}: {error}") from error
    found = [match for line in lines if (match := _SUMMARY.match(line))]
    if not found:
        raise ReportError(f"{path}: no summary of compute-sanitizer in it")
    errors = 0
    for match in found:
        counted = _COUNTS[match["kind"] or "ERROR"].search(match["text"])
        if counted is None:
            raise ReportError(f"{path}: cannot read {match.group()!r}")
        errors += int(counted[1])
    return {"log": path.name, "errors": errors, "summary": [match["text"] for match in found]}


def results(
    junit: Sequence[Path],
    sanitizer: Sequence[Path],
    by_function: bool = False,
    target: str | None = None,
) -> dict[str, Any]:
    """Everything that the JSON file says. target: whose kernels were run, where not the chip's own.

    Raises: ReportError.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        **({"target": target} if target else {}),
        **to_data(describe_machine()),
        "tests": summarise_junit(*junit, by_function=by_function),
        "sanitizer": [summarise_sanitizer(path) for path in sanitizer],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 where a test failed, none passed or a sanitizer found something, 2 where a report is
    unreadable."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--junit", type=Path, nargs="+", required=True, metavar="XML")
    parser.add_argument("--by-function", action="store_true", help="counts of each function too")
    parser.add_argument("--sanitizer", type=Path, nargs="+", default=[], metavar="LOG")
    parser.add_argument("--target", help="whose kernels were run, where not the chip's own")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="JSON")
    options = parser.parse_args(arguments)
    try:
        found = results(options.junit, options.sanitizer, options.by_function, options.target)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    tests = found["tests"]
    print(", ".join(f"{tests[name]} {name}" for name in OUTCOMES))
    wrong = tests["failed"] + tests["errors"] + sum(log["errors"] for log in found["sanitizer"])
    return 1 if wrong or not tests["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
