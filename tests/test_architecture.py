"""The rooms of `lm/` stay as they are: imports go down the floors only, there are no cycles, no pickles.

What libraries keep private stands in two files.
"""

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
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
    "lm", "lm.errors", "lm.system", "lm.runs", "lm.cli.command", "lm.cli.request", "lm.cli.options", "lm.cli.runs",
    "lm.cli.runs_compare", "lm.cli.report", "lm.cli.monitor", "lm.cli.charts", "lm.cli.data", "lm.cli.scale",
    "lm.model.config", "lm.model.estimates", "lm.model.memory", "lm.data.config", "lm.training.builtin_optimizers",
    "lm.training.optimizer_rules", "lm.training.config", "lm.training.schedule",
    "lm.training.alerts",
]  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """Which room a module is in: `training.callbacks` is a room of its own."""
    name = module.removeprefix("lm.")
    return "training.callbacks" if name.startswith("training.callbacks") else name.partition(".")[0]


def imports(path: Path, in_functions: bool = True) -> set[str]:
    """The modules of lm that a file imports, anywhere in it, or as soon as it is imported; not for types alone."""
    found, nodes = set(), list(parsed(path).body)
    for node in nodes:  # grows meanwhile
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not is_for_types_alone(node) and (in_functions or not isinstance(node, FUNCTIONS)):
            nodes += ast.iter_child_nodes(node)
    return found & FILES.keys() - {"lm"}


def is_for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


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


# ---- what a command imports -----------------------------------------------------------------------------------------
# Command -> the modules that run it, and the most lines of ours that they may import as they are imported.
COMMANDS = {
    "fit": (["lm.cli.request", "lm.cli.fit"], 13_000),
    "generate": (["lm.cli.request", "lm.cli.generate"], 8_500),
    "monitor": (["lm.cli.monitor"], 4_000),
}
LEAVES = {  # what only an option, a device or another command asks for
    "lm.training.callbacks": "alerts budget call_thread evaluation events postmortem predictions samples "
                             "spike_injection throughput_floor",
    "lm.training": "alerts budget checkpoint_checks distributed launcher muon muon_ranks optimizer_by_class optimizer_rules fp8 out_of_memory "
                   "plain_run_state",
    "lm.evaluation": "benchmark prompts public_tasks scoring tasks",
    "lm.data": "cache documents encode mixture overlap packing prepare rare reshuffle splits text_batches text_files",
    "lm.model": "builtin compile custom fused low_precision memory",
    "lm.runs": "config_diff expectations facts history postmortem registry resume",
    "lm.system": "hub remote",
    "lm.cli": "bench_step brief_fit charts help hours ladder ladder_report plan plan_checks plan_facts profile_step report.run scale scale_hours scaling_rules",
}  # fmt: skip


def imported_with(*modules: str) -> set[str]:
    """The modules of lm that are imported as soon as these are: not those of functions, nor for types alone."""
    found, waiting = set(), {*modules, "lm"}
    while waiting:
        found |= waiting
        waiting = set().union(*(imports(FILES[module], in_functions=False) for module in waiting)) - found
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_what_it_uses(command):
    modules, most = COMMANDS[command]
    lines = {
        name: FILES[name].read_text().count("\n") for name in imported_with("lm.__main__", "lm.cli.command", *modules)
    }
    assert sum(lines.values()) <= most, sorted(lines.items(), key=lambda item: -item[1])


def test_no_core_file_imports_a_leaf():
    leaves = {f"{room}.{name}" for room, names in LEAVES.items() for name in names.split()}
    assert leaves <= FILES.keys()
    assert imported_with("lm.__main__", "lm.cli.command", *COMMANDS["fit"][0]) & leaves == set()


def test_the_model_knows_nothing_of_lightning():
    assert [name for name, path in FILES.items() if room(name) == "model" and "lightning" in path.read_text()] == []


OTHERS = {"trainer", "_trainer", "module", "pl_module", "lightning_module", "datamodule", "data"}


def owner(target: ast.expr) -> list[str]:
    """The names of the object whose attribute is set: `config.trainer.devices` has ["config", "trainer"]."""
    names = []
    while isinstance(target, ast.Attribute):
        target = target.value
        names.append(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "?"))
    return names[::-1]


def test_nobody_sets_an_attribute_of_a_trainer_a_module_or_the_data():
    """What changes in a run is `RunState`'s. `should_stop` is how Lightning's callbacks ask for the end of a fit."""
    found = []
    for name, path in FILES.items():
        for node in ast.walk(parsed(path)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
                targets = [ast.Attribute(node.args[0], "?")]
            for target in [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]:
                names = owner(target) if isinstance(target, ast.Attribute) else []
                of_options = "config" in names  # of the YAML: its groups have these names too
                if names and names[-1] in OTHERS and not of_options and target.attr != "should_stop":
                    found.append(f"{name}: {'.'.join(names)}.{target.attr}")
    assert [one for one in found if not one.startswith("lm.training.lightning_patches")] == []


def test_names_say_something():
    assert not [name for name in FILES if name.split(".")[-1] in ("utils", "util", "common", "helpers", "misc")]


def test_nothing_is_unpickled_or_evaluated():
    calls = {"eval", "exec"}
    for path in FILES.values():
        for node in ast.walk(parsed(path)):
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
        and name not in ("lm.runs.checkpoint", "lm.runs.json_tree", "lm.runs.resume")
    ]
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n importlib.import_module(name)\n"
    code += " assert 'torch' not in sys.modules and 'lightning' not in sys.modules, name"
    subprocess.run([sys.executable, "-c", code, *light], check=True)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_command_line_answers_without_torch(arguments):
    """`lm --help` is there at once: under half a second, and torch is not even imported."""
    code = f"import sys; from lm.cli.command import main; main({arguments!r}); assert 'torch' not in sys.modules"
    assert run_python(code)[1] < 2  # usually less than a tenth of a second


def test_an_editable_install_is_found_beside_a_clone_that_is_called_lm(tmp_path):
    """That folder, without an `__init__.py`, is a package too, which `lm` in a folder on the path overrules."""
    pytest.importorskip("setuptools.build_meta")
    clone, site = tmp_path / "lm", tmp_path / "site"
    for name in ("pyproject.toml", "README.md", "LICENSE", "lm/cli/report/uPlot.LICENSE", "lm/__init__.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE.parent / name, clone / name)
    (clone / "lm/kernels/csrc").mkdir(parents=True)  # a folder of no modules
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(site)
    found = f"import site; site.addsitedir({str(site)!r}); import lm; print(lm.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", found], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.stdout.strip() == str(clone / "lm/__init__.py"), done.stderr


# ---- private names of other libraries --------------------------------------------------------------------------------
# These two say why they use what a library does not promise; it stands nowhere else, except for:
PRIVATE = ("lm.kernels.torch_private", "lm.training.lightning_patches")
LIBRARIES = ("jsonargparse", "lightning", "tensorboard", "torch", "torchmetrics")
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}  # of named tuples and `os`, by the standard library
ALLOWED = {
    # argparse and jsonargparse list options under no other name
    "lm.cli.request": {"_actions"}, "lm.system.arguments": {"_actions", "_typehint"},
    "lm.data.encode": {"_processes"},  # a pool ends its processes by a public name from Python 3.14 on
    "lm.system.hub": {"_fetch_range", "_open"},  # what fsspec documents as the methods that a file system defines
}  # fmt: skip
ASSIGNED = {
    "forward",  # which torch leaves to each class of modules
    "done", "run", "start", "stop",  # attributes of RunState and Rollback; loops and spans have methods of these names
}  # fmt: skip
NAMED_WHILE_RUNNING = {"lm.model.compile"}  # `setattr` with `forward` or `fused_mlp` of a block


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(node: ast.AST) -> bool:
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return call or isinstance(node, ast.Name) and node.id in ("self", "cls")


def names_defined_in(node: ast.ClassDef) -> set[str]:
    """The methods and attributes that a class gives itself."""
    found = {inner.name for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef)}
    found |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
    return found | {
        inner.attr for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and is_self(inner.value)
    }  # fmt: skip


CLASSES = {
    (name, node.name): node
    for name, path in FILES.items() for node in parsed(path).body if isinstance(node, ast.ClassDef)
}  # fmt: skip


def foreign_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("lm", "builtins")]


def private_uses(name: str, tree: ast.Module) -> list[str]:
    """The private names of others in a file of lm, with their lines."""
    own, overridden = {}, []  # nodes of `self._x` with `_x` of a class of ours; `def _x` of a method that a base has
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        kind = getattr(importlib.import_module(name), node.name, None)
        bases = [(base.__module__, base.__name__) for base in kind.__mro__[1:]] if kind else []
        defined = names_defined_in(node).union(*(names_defined_in(CLASSES[base]) for base in bases if base in CLASSES))
        own |= {inner: True for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute) and is_self(inner.value) and inner.attr in defined}  # fmt: skip
        theirs = {attribute for base in foreign_bases(kind or object) for attribute in vars(base)}
        overridden += [(inner.lineno, inner.name) for inner in node.body
                       if isinstance(inner, ast.FunctionDef) and inner.name in theirs]  # fmt: skip
    found = overridden
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and node not in own:
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [text.value for text in node.args[1:2] if isinstance(text, ast.Constant)]
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"({'|'.join(LIBRARIES)})(\.\w+)+", str(node.value)):
            names = node.value.split(".")  # of a module, for `sys.modules`
        found += [(node.lineno, each) for each in names]
    allowed = DOCUMENTED | ALLOWED.get(name, set())
    return sorted({f"{name}:{line} {each}" for line, each in found if is_private(each) and each not in allowed})


def library_methods() -> set[str]:
    """The names of all methods of the libraries' classes that lm imports or inherits from."""
    kinds = {
        base
        for name in FILES if name != "lm.__main__"
        for value in vars(importlib.import_module(name)).values() if isinstance(value, type)
        for base in value.__mro__ if base.__module__.partition(".")[0] in LIBRARIES
    }  # fmt: skip
    return {name for kind in kinds for name, value in vars(kind).items() if inspect.isroutine(value)}


def replaced_methods(name: str, tree: ast.Module, methods: set[str]) -> list[str]:
    """Where a file of lm assigns to an attribute of another object that is a method of a library's class."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not is_self(node.value):
            found += [f"{name}:{node.lineno} {node.attr}"] if node.attr in methods - ASSIGNED else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if not is_self(node.args[0]) and name not in NAMED_WHILE_RUNNING:
                found.append(f"{name}:{node.lineno} {node.func.id}")
    return found


def test_what_libraries_keep_private_stands_in_two_files():
    for name, path in FILES.items():
        if name not in PRIVATE and name != "lm.__main__":
            assert private_uses(name, parsed(path)) == []


def test_methods_of_libraries_are_replaced_in_one_file():
    methods = library_methods()
    for name, path in FILES.items():
        if name not in PRIVATE:
            assert replaced_methods(name, parsed(path), methods) == []


@pytest.mark.parametrize(("code", "found"), [
    ("trainer._x = 1", ["lm.training.trainer:1 _x"]),
    ("from lightning.pytorch.loops.fit_loop import _FitLoop", ["lm.training.trainer:1 _FitLoop"]),
    ("import torch._dynamo", ["lm.training.trainer:1 _dynamo"]),
    ("sys.modules['torch._dynamo.utils']", ["lm.training.trainer:1 _dynamo"]),
    ("getattr(trainer, '_x')", ["lm.training.trainer:1 _x"]),
    ("class Trainer:\n  def f(self): self._logger_connector", ["lm.training.trainer:2 _logger_connector"]),
    ("class Trainer:\n  def _fit_impl(self): super()._fit_impl()", ["lm.training.trainer:2 _fit_impl"]),
    ("class Trainer:\n  def f(self): self._y = 1; return self._y", []),
])  # fmt: skip
def test_private_names_are_found(code, found):
    assert private_uses("lm.training.trainer", ast.parse(code)) == found


@pytest.mark.parametrize("code", ["a.run = 1; logger.log_metrics = print", "setattr(a.logger, name, 1)"])
def test_replaced_methods_are_found(code):
    assert len(replaced_methods("lm.training.trainer", ast.parse(code), {"log_metrics"})) == 1
