"""What is installed works by itself: a wheel in an empty folder, its version, and beside the other project called lm."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from lm import __version__
from lm.system.process import lm_version

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"


def run(folder, *command, expect=0):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == expect, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment with a wheel of the sdist of this checkout, and the libraries of this one."""
    pytest.importorskip("setuptools.build_meta")
    folder = tmp_path_factory.mktemp("package")
    (folder / "clone").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "clone")
    for name in ("lm", "configs"):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "clone" / name, symlinks=True, ignore=leave)
    run(folder / "clone", sys.executable, "-c", BUILD.format("build_sdist"), folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        sdist.extractall(folder, filter="data")
    run(next(folder.glob("lm_pretrain-*/")), sys.executable, "-c", BUILD.format("build_wheel"), folder)
    wheel = next(folder.glob("*.whl"))
    assert wheel.stat().st_size < 4e6 and wheel.name == f"lm_pretrain-{__version__}-py3-none-any.whl"
    venv.create(folder / "env")
    python = folder / "env/bin/python"
    run(folder, sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (Path(site) / "libraries.pth").write_text("\n".join(others) + "\n")
    return python


@pytest.mark.slow
def test_a_wheel_in_an_empty_folder_trains_and_plans(installed, tmp_path):
    steps = ("--trainer.max_steps", 2, "--trainer.val_interval", 2, "--data.val_tokens", 4096)
    run(tmp_path, installed, "-m", "lm", "fit", "--config", "tiny.yaml", *steps)
    run(tmp_path, installed.with_name("lm"), "plan", "--strict", "--config", "published/pretrain-50m-adamw.yaml")
    used = "import lm; print(lm.__file__, lm.load_run('tiny').read('run.json')['versions']['lm'])"
    file, version = run(tmp_path, installed, "-c", used).split()
    assert Path(file).is_relative_to(installed.parents[1]) and version == __version__
    assert all((Path(file).parent / path.relative_to(ROOT)).exists() for path in (ROOT / "configs").rglob("*"))


@pytest.mark.slow
def test_the_version_has_the_commit_that_pip_installed(installed, tmp_path):
    folder = next((installed.parents[1] / "lib").glob("*/site-packages/lm_pretrain-*.dist-info"))
    (folder / "direct_url.json").write_text(json.dumps({"vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}))
    assert run(tmp_path, installed, "-m", "lm", "--version") == f"{__version__}+012345678\n"


def test_the_version_of_a_clone_has_its_commit():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    commit = run(ROOT, "git", "rev-parse", "--short=9", "HEAD").strip()
    assert lm_version().removesuffix(".dirty") == f"{__version__}+{commit}"


@pytest.mark.parametrize("begin", ["__version__ = '0.1.0'\n", None], ids=["installed after it", "and removed"])
def test_the_other_project_called_lm_in_the_same_folder_is_named(tmp_path, begin):
    """Both have a `lm/__init__.py`: pip replaces ours by theirs, and `pip uninstall lm` removes it."""
    (tmp_path / "lm").mkdir()
    for path in (ROOT / "lm").iterdir():
        if path.name != "__init__.py":
            (tmp_path / "lm" / path.name).symlink_to(path)
    if begin:
        (tmp_path / "lm/__init__.py").write_text(begin)
    command = [sys.executable, "-S", "-m", "lm", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={})
    assert (done.returncode, done.stdout) == (1, "") and "pip uninstall lm; pip install --force" in done.stderr


def test_windows_is_refused_in_a_line():
    code = "import sys; sys.platform = 'win32'; from lm.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.endswith("in WSL\n")


def test_a_release_has_notes_and_needs_every_other_job():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert set(jobs["release"]["needs"]) == jobs.keys() - {"release"}
    assert {"run": "bash .ci/run"} in jobs["linux"]["steps"]
    assert f"\n## {__version__}" in (ROOT / ".github/RELEASES.md").read_text()


def test_what_ci_installs_is_what_the_requirements_allow():
    """Without the `.ci/lock` that writes the list again, CI would test other versions than a change asks for."""
    requirements = pytest.importorskip("packaging.requirements")
    ci = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11", "extra": ""}
    lines = [line.split(" --hash=sha256:") for line in (ROOT / ".ci/lock.txt").read_text().splitlines()[1:]]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for _, digest in lines)
    listed = {re.sub("[._]", "-", name.lower()): version for name, version in (one.split("==") for one, _ in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["test"]:
        wanted = requirements.Requirement(text)
        if not wanted.marker or wanted.marker.evaluate(ci):
            assert wanted.name in listed and wanted.specifier.contains(listed[wanted.name], prereleases=True), text


def prose(page: Path) -> str:
    """The Markdown of a page or a notebook, without its blocks of code."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", each) for each in re.findall("^#+ (.+)$", prose(page), re.M))
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_lead_somewhere_and_the_readme_leads_to_the_page_of_every_folder():
    folders = [ROOT / name for name in (".github", "configs", "lm", "notebooks", "tests")]
    pages = [
        ROOT / "README.md",
        *(page for folder in folders for page in folder.rglob("*") if page.suffix in (".md", ".ipynb")),
    ]
    found = {}
    for page in pages:
        for link in re.findall(r"\]\(([^)]+)\)", prose(page)):
            name, _, anchor = re.sub(r"\s", "", link).partition("#")
            target = (page.parent / name).resolve() if name else page
            if "://" not in name and page.name != "postmortem.md":  # a template
                assert target.exists() and (not anchor or anchor in anchors(target)), (page, link)
                found.setdefault(page, set()).add(target)
    assert {page for page in pages[1:] if page.name == "README.md"} <= found[pages[0]]
