"""The table of faults is what was tried, and all of it."""

import ast
import json
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MATRIX = runpy.run_path(str(HERE / "faults" / "matrix.py"))
RESULTS = HERE / "faults" / "results.json"


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def marked(path: Path) -> set[str]:
    """The numbers of the faults that a file's tests are marked with."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    numbers = [call.args[0] for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "fault"]
    return {str(number.value) for number in numbers if isinstance(number, ast.Constant)}


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_fault_was_tried_and_nothing_failed(results):
    """A skipped test is allowed, for what needs a GPU, beside one that passed."""
    assert sorted(results, key=int) == [str(number) for number in MATRIX["FAULTS"]]
    assert [number for number, tests in results.items() if "passed" not in tests.values()] == []
    assert [test for tests in results.values() for test, outcome in tests.items() if outcome == "failed"] == []


def test_the_table_is_made_from_the_results(results):
    text = MATRIX["README"].read_text()
    assert MATRIX["BEGIN"] + MATRIX["table"](results) + MATRIX["END"] in text
    assert all(f"| {number} | {fault} |" in text for number, (fault, _) in MATRIX["FAULTS"].items())


def test_the_results_name_the_tests_that_there_are(results):
    """A test that was renamed, added or marked with another fault makes the results stale."""
    tried: dict[str, set[str]] = {}
    for number, tests in results.items():
        for test in tests:
            file, _, name = test.partition("::")
            assert name.partition("[")[0] in functions(HERE.parent / file), test
            tried.setdefault(file, set()).add(number)
    there = {path.relative_to(HERE.parent).as_posix(): marked(path) for path in HERE.rglob("test_*.py")}
    assert {file: numbers for file, numbers in there.items() if numbers} == tried
