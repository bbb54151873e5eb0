"""The summary of a GPU test run, from fabricated reports."""

import importlib.util
import json

import pytest

from attngen.compiler import digest
from tests.support.paths import ROOT

TOOL = ROOT / "tools" / "gpu_results.py"
_spec = importlib.util.spec_from_file_location("gpu_results", TOOL)
gpu_results = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu_results)

CASES = """
<testcase classname="tests.gpu.a" name="test_right" time="1"/>
<testcase classname="tests.gpu.a" name="test_wrong"><failure message="AssertionError: 3 &gt; 2
more of it">long text</failure></testcase>
<testcase classname="tests.gpu.b" name="test_broken"><error message="fixture"/></testcase>
<testcase classname="tests.gpu.b" name="test_both"><failure message="first"/></testcase>
<testcase classname="tests.gpu.b" name="test_both"><error message="teardown"/></testcase>
<testcase classname="tests.gpu.b" name="test_two"><skipped message="needs two devices"/></testcase>
<testcase classname="tests.gpu.b" name="test_six"><skipped message="needs two devices"/></testcase>
"""
MEMCHECK = "========= COMPUTE-SANITIZER\nright  d64\n========= ERROR SUMMARY: 0 errors\n"
RACECHECK = (
    "========= COMPUTE-SANITIZER\n"
    "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
)


def write(path, text):
    path.write_text(text)
    return path


def junit(tmp_path, cases=CASES):
    suite = f'<testsuite time="12.34">{cases}</testsuite>'
    return write(tmp_path / "report.xml", f"<testsuites>{suite}</testsuites>")


def test_junit_every_outcome_is_counted_once(tmp_path):
    summary = gpu_results.summarise_junit(junit(tmp_path))
    assert {name: summary[name] for name in ("passed", "failed", "errors", "skipped")} == {
        "passed": 1,
        "failed": 2,
        "errors": 1,
        "skipped": 2,
    }
    assert summary["seconds"] == 12.3
    assert summary["failures"] == {
        "tests.gpu.a::test_wrong": "AssertionError: 3 > 2 more of it",
        "tests.gpu.b::test_broken": "fixture",
        "tests.gpu.b::test_both": "first",
    }
    assert summary["skip_reasons"] == {"needs two devices": 2}


def test_reports_in_parts_count_as_one_with_what_functions_came_to(tmp_path):
    first = junit(tmp_path, '<testcase classname="m" name="test_a[1-x]" time="1"/>')
    first = first.rename(tmp_path / "first.xml")
    more = '<testcase classname="m" name="test_a[2::y]"><skipped message="s"/></testcase>'
    more += '<testcase classname="m" name="test_b"/>'
    summary = gpu_results.summarise_junit(first, junit(tmp_path, more), by_function=True)
    assert summary["functions"] == {
        "test_a": {"passed": 1, "skipped": 1},
        "test_b": {"passed": 1},
    }
    assert (summary["passed"], summary["skipped"], summary["seconds"]) == (2, 1, 24.7)


@pytest.mark.parametrize("text", ["", "not xml", "<testsuites/>", "<a><b/></a>"])
def test_junit_without_tests_is_refused(tmp_path, text):
    with pytest.raises(gpu_results.ReportError):
        gpu_results.summarise_junit(write(tmp_path / "report.xml", text))


def test_junit_missing_file_is_refused(tmp_path):
    with pytest.raises(gpu_results.ReportError):
        gpu_results.summarise_junit(tmp_path / "none.xml")


@pytest.mark.parametrize("text, errors", [(MEMCHECK, 0), (RACECHECK, 2), (MEMCHECK + RACECHECK, 2)])
def test_sanitizer_summaries_are_added_up(tmp_path, text, errors):
    summary = gpu_results.summarise_sanitizer(write(tmp_path / "tool.log", text))
    assert summary["errors"] == errors and summary["log"] == "tool.log"
    assert len(summary["summary"]) == text.count("SUMMARY")


@pytest.mark.parametrize("text", ["", "========= COMPUTE-SANITIZER\nright\n", "SUMMARY: 0 errors"])
def test_sanitizer_log_without_summary_is_refused(tmp_path, text):
    with pytest.raises(gpu_results.ReportError):
        gpu_results.summarise_sanitizer(write(tmp_path / "tool.log", text))


def test_main_writes_what_ran_on_what(tmp_path, capsys):
    output = tmp_path / "deep" / "out.json"
    race = write(tmp_path / "racecheck.log", RACECHECK)
    arguments = ["--junit", str(junit(tmp_path)), "-o", str(output), "--sanitizer", str(race)]
    assert gpu_results.main(arguments) == 1
    found = json.loads(output.read_text())
    assert found["schema"] == 1 and found["tests"]["passed"] == 1
    assert found["sanitizer"][0]["errors"] == 2
    assert found["sources"] == digest.source_digests()
    assert {"chip", "driver", "torch", "cuda", "nvrtc", "python", "date"} <= found.keys()
    assert "target" not in found
    assert "1 passed, 2 failed, 1 errors, 2 skipped" in capsys.readouterr().out
    gpu_results.main([*arguments, "--target", "sm_90"])
    assert json.loads(output.read_text())["target"] == "sm_90"


def test_main_everything_right_exits_with_0(tmp_path):
    report = junit(tmp_path, '<testcase classname="a" name="b"/>')
    memcheck = write(tmp_path / "memcheck.log", MEMCHECK)
    output = tmp_path / "out.json"
    arguments = ["--junit", str(report), "--sanitizer", str(memcheck), "-o", str(output)]
    assert gpu_results.main(arguments) == 0


def test_main_nothing_but_skips_exits_with_1(tmp_path):
    report = junit(tmp_path, '<testcase classname="a" name="b"><skipped message="c"/></testcase>')
    assert gpu_results.main(["--junit", str(report), "-o", str(tmp_path / "out.json")]) == 1


def test_main_unreadable_report_exits_with_2_and_writes_nothing(tmp_path, capsys):
    output = tmp_path / "out.json"
    arguments = ["--junit", str(tmp_path / "none.xml"), "-o", str(output)]
    assert gpu_results.main(arguments) == 2
    assert not output.exists() and "none.xml" in capsys.readouterr().err
