"""The house stays a house: imports go down the floors, no cycles, files that fit a head."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lm"

# The floor of a module is that of the longest prefix here. Imports go down, or stay inside one package of a floor.
FLOORS = {
    "lm": 0, "lm.errors": 0, "lm.terminal": 0, "lm.quantities": 0, "lm.leaving": 0, "lm.documents": 0,
    "lm.stop_signals": 0.2, "lm.run_shapes": 0.5,
    "lm.steps": 0.5, "lm.muon": 0.5, "lm.hardware": 0.5, "lm.telemetry": 0.5, "lm.plain": 0.5, "lm.kernels": 0.5,
    "lm.sealed": 0.5, "lm.room": 0.5, "lm.leftovers": 0.5,
    "lm.arguments": 1, "lm.model": 1, "lm.data": 1, "lm.optim": 1, "lm.schedule": 1, "lm.checkpoint": 1, "lm.runs": 1,
    "lm.launcher": 1, "lm.loops": 1, "lm.devices": 1,
    "lm.expressions": 0.5, "lm.alerts": 1, "lm.spending": 0.5, "lm.registry_file": 1, "lm.registry": 1.5,
    "lm.run_files": 0.7, "lm.run_lock": 0.7, "lm.run_facts": 0.5, "lm.steady_clock": 0, "lm.out_of_memory": 1.7,
    "lm.incident": 0.5, "lm.post_mortem_page": 1, "lm.post_mortem": 1.5, "lm.probe": 2, "lm.evidence": 2.5,
    "lm.sharding": 1.5, "lm.precision": 1.5, "lm.scaling": 1.5,
    "lm.metrics": 1.5, "lm.snapshot": 1.5, "lm.micro_step": 1, "lm.tally": 1,
    "lm.checkpoint_io": 1.5,
    "lm.module": 2, "lm.trainer": 2, "lm.resume": 2, "lm.generation": 2,
    "lm.sampling": 1, "lm.weights": 1.5, "lm.completion": 2.1, "lm.pretrained": 2.2,
    "lm.decode_step": 1.5, "lm.evaluation_log": 0.5, "lm.reload_check": 2.3, "lm.provenance": 2.3, "lm.model_card": 2.4,
    "lm.evaluation": 2.5, "lm.inspection": 2.5,
    "lm.callbacks": 3,
    "lm.config_file": 3.5,
    "lm.commands": 4,
    "lm.lightning_cli": 5, "lm.cli": 6, "lm.__main__": 7,
}  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def unit(module: str) -> str:
    """The longest prefix of a module that has a floor."""
    parts = module.split(".")
    return next(".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in FLOORS)


def imports(path: Path) -> set[str]:
    """The modules of lm that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(node.module or "")
    return {name for name in found if name in FILES and name != "lm"}


def test_every_module_has_a_floor():
    assert [name for name in FILES if name != "lm" and unit(name) == "lm"] == []


def test_imports_go_down_the_floors():
    climbs = [
        f"{name} imports {other}"
        for name, path in FILES.items()
        for other in imports(path)
        if unit(name) != unit(other) and FLOORS[unit(other)] >= FLOORS[unit(name)] and name != "lm"  # the front door
    ]
    assert climbs == []


def test_no_cycles():
    graph = {name: imports(path) - {name} for name, path in FILES.items()}
    while leaves := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    assert graph == {}


def test_model_and_data_do_not_know_each_other_and_the_model_knows_nothing_of_training():
    for name, path in FILES.items():
        modules = imports(path)
        text = path.read_text()
        if name.startswith("lm.model"):
            assert not any(other.startswith("lm.data") for other in modules) and "lightning" not in text, name
        if name.startswith("lm.data"):
            assert not any(other.startswith("lm.model") for other in modules), name


def test_files_fit_a_head():
    long = {name: lines for name, path in FILES.items() if (lines := len(path.read_text().splitlines())) > 300}
    assert long == {}


def test_names_say_something():
    assert not [name for name in FILES if name.split(".")[-1] in ("utils", "util", "common", "helpers", "misc")]


def test_nothing_is_unpickled_or_evaluated():
    calls = {"eval", "exec"}
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in calls, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load") and node.value.id != "pickle", path


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_command_line_answers_without_torch(arguments):
    """`lm --help` is there at once: under half a second, and torch is not even imported."""
    code = f"import sys; from lm.cli import main; main({arguments!r}); assert 'torch' not in sys.modules"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.monotonic() - began < 2  # half a second on an idle machine
