"""Writes what the tests of each fault came to: `--fault-report FILE`, which `tests/faults/matrix.py` makes a table of.

Marks count wherever they stand. Under pytest-xdist the reports of the workers reach the process that writes.
"""

import json
from pathlib import Path

import pytest

SEVERITY = ("passed", "skipped", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-report", type=Path, help="write the outcomes of the tests of each fault, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--fault-report")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FaultReport(path.absolute()))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of faults kill or starve real trainings, so they are slow; their reports say of which fault they are."""
    for item in items:
        numbers = sorted({mark.args[0] for mark in item.iter_markers("fault")})
        item.user_properties += [("fault", number) for number in numbers]
        if numbers:
            item.add_marker(pytest.mark.slow)


class FaultReport:
    """Collects the outcomes and writes them at the end.

    Args:
        path: a JSON file: fault number -> test -> `passed`, `skipped` or `failed`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[int, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for number in [value for name, value in report.user_properties if name == "fault"]:
            tests = self.outcomes.setdefault(number, {})
            tests[report.nodeid] = max(tests.get(report.nodeid, "passed"), report.outcome, key=SEVERITY.index)

    def pytest_sessionfinish(self) -> None:
        ordered = {number: dict(sorted(self.outcomes[number].items())) for number in sorted(self.outcomes)}
        self.path.write_text(json.dumps(ordered, indent=1) + "\n")
