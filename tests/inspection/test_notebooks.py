"""The notebooks run from top to bottom in a kernel, on a run that was really trained, and say what they show."""

import json
from pathlib import Path

import pytest
from trainings import PLACES, fit

from lm.runs.run import Run

FOLDER = Path(__file__).parent.parent.parent / "notebooks"
BOOKS = {  # name -> the least it shows: figures, and tables or coloured texts
    "inspect_run": (1, 3), "inspect_data": (0, 1), "inspect_model": (4, 0), "samples": (0, 4),
    "train": (1, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(workplace):
    """A run with several checkpoints, samples and an alert, and another one beside it."""
    changes = {"samples.prompts": ["Chapter 1"], "trainer.keep_checkpoints": 5, "guards.alerts": {"step > 10": "warn"}}
    fit(workplace, "small", "--model.optimizer.lr", "0.02", **changes)
    fit(workplace, "small", **changes)
    return Run(workplace / "checkpoints/small-2")


def test_every_notebook_is_known_here():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(BOOKS)


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_is_plain_and_says_first_what_it_shows(name):
    """No outputs and no counts are kept; a title and a sentence; then the parameters; then short cells."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    first, second = ("".join(cell["source"]) for cell in cells[:2])
    assert cells[0]["cell_type"] == "markdown" and first.startswith("# ") and first.rstrip().endswith(".")
    wanted = 'FOLDER = os.environ.get("LM_NOTEBOOK_FOLDER", "..")' if name == "train" else (
        'RUN = os.environ.get("LM_NOTEBOOK_RUN", "../checkpoints/tiny")')  # fmt: skip
    assert wanted in second
    assert cells[1]["metadata"]["tags"] == ["parameters"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            assert len(cell["source"]) <= 20 and not any(line.startswith(("def ", "class ")) for line in cell["source"])


@pytest.fixture(scope="module")
def cells(run):
    """Notebook -> its cells, after they have run from its folder, as Jupyter runs them.

    All notebooks run in one kernel, which forgets the names of each and has imported torch once.
    """
    nbformat, client, _ = map(pytest.importorskip, ("nbformat", "nbclient", "ipykernel"))
    books = {name: nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells for name in BOOKS}
    books["train"][1].source = books["train"][1].source.replace("STEPS = 150", "STEPS = 20")
    whole = nbformat.v4.new_notebook()
    for name, book in books.items():
        for cell in book:
            cell.id = f"{name}-{cell.id}"
        whole.cells += [*book, nbformat.v4.new_code_cell("%reset -f")]
    environment = {"LM_NOTEBOOK_RUN": str(run.path), "LM_NOTEBOOK_FOLDER": str(run.path.parent.parent),
                   "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client.NotebookClient(whole, timeout=180, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return books


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs_and_shows_what_it_promises(name, cells):
    """Every cell that ends with a picture shows one, and there are no warnings."""
    shown = [output for cell in cells[name] for output in cell.get("outputs", [])]
    kinds = [kind for output in shown for kind in output.get("data", {})]
    pictures, tables = BOOKS[name]
    assert shown and kinds.count("image/png") >= pictures and kinds.count("text/html") >= tables
    assert [output.text for output in shown if output.get("name") == "stderr"] == []
