"""The rooms of `lm/` stay as they are: imports go down the floors only, there are no cycles, no pickles."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from processor_time import run_python

PACKAGE = Path(__file__).parent.parent / "lm"

# A module may import its own room and the rooms on the floors below that are named beside it.
ROOMS = {
    "errors": (0, ""),
    "system": (1, "errors"),
    "kernels": (1, "errors"),
    "data": (2, "errors system"),
    "runs": (2, "errors system"),
    "model": (2, "errors system kernels"),
    "inference": (3, "errors system kernels data runs model"),
    "evaluation": (3, "errors system kernels data runs model"),
    "training": (4, "errors system kernels data runs model evaluation"),
    "inspection": (4, "errors system kernels data runs model inference"),
    "training.callbacks": (5, "errors system kernels data runs model evaluation inference training inspection"),
    "cli": (6, "errors system kernels data runs model evaluation inference training training.callbacks inspection"),
    "__main__": (7, "errors system cli"),
}
WITHOUT_TORCH = [
    "lm", "lm.errors", "lm.system", "lm.runs", "lm.cli.main", "lm.cli.runs", "lm.cli.runs_compare",
    "lm.cli.runs_html", "lm.cli.monitor", "lm.cli.charts", "lm.cli.scale", "lm.model.config", "lm.model.estimates",
    "lm.data.config", "lm.training.config", "lm.training.schedule", "lm.training.alerts", "lm.cli.options",
    "lm.cli.command_options",
]  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """Which room a module is in: `training.callbacks` is a room of its own."""
    name = module.removeprefix("lm.")
    return "training.callbacks" if name.startswith("training.callbacks") else name.partition(".")[0]


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


def test_the_packages_are_these():
    at_root = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert at_root == {name.partition(".")[0] for name in ROOMS} | {"__init__"}


def test_packages_are_empty():
    assert [path for path in PACKAGE.rglob("*/__init__.py") if path.read_text()] == []


def test_imports_go_down_the_floors():
    for name, (floor, below) in ROOMS.items():
        assert all(ROOMS[other][0] < floor for other in below.split()), name
    climbs = [
        f"{name} imports {other}"
        for name, path in FILES.items()
        for other in imports(path)
        if name != "lm" and room(other) != room(name) and room(other) not in ROOMS[room(name)][1].split()
    ]
    assert climbs == []


def test_no_cycles():
    graph = {name: imports(path) - {name} for name, path in FILES.items()}
    while leaves := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    assert graph == {}


def test_the_model_knows_nothing_of_lightning():
    assert [name for name, path in FILES.items() if room(name) == "model" and "lightning" in path.read_text()] == []


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


def test_what_only_looks_imports_no_torch():
    """`lm runs`, `lm monitor` and `lm scale` answer at once; a checkpoint's tensors need torch."""
    light = [
        name
        for name in FILES
        if any(name == start or name.startswith(start + ".") and start != "lm" for start in WITHOUT_TORCH)
        and name not in ("lm.runs.checkpoint", "lm.runs.resume")
    ]
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n importlib.import_module(name)\n"
    code += " assert 'torch' not in sys.modules and 'lightning' not in sys.modules, name"
    subprocess.run([sys.executable, "-c", code, *light], check=True)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_command_line_answers_without_torch(arguments):
    """`lm --help` is there at once: under half a second, and torch is not even imported."""
    code = f"import sys; from lm.cli.main import main; main({arguments!r}); assert 'torch' not in sys.modules"
    assert run_python(code)[1] < 2  # usually less than a tenth of a second
