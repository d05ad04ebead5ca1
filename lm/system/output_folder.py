"""The folder or file that a command writes, its `--output`, and the size of a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm.errors import RequestError
from lm.system.files import atomic_folder, check_local_path


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An `atomic_folder` for the `--output` of a command, whose name must be free or an empty folder."""
    check_local_path("--output", target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"--output {target} is there already and not an empty folder; choose another")
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(target) as folder:
        yield folder


def write_new_file(target: Path, text: str) -> None:
    """Write the `--output` of a command, whose name must be free."""
    check_local_path("--output", target)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(f"--output {target} is there already; give another name, or remove it") from None


def folder_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*"))
