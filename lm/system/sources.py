"""The files of a source: which ones a path, folder, glob or URL means, and how they are opened.

`data/catalog` and `data/text_files` find them with `list_files` and open them with `open_file`. What a URL needs is in
`system/remote`, which is imported for one.
"""

import os
import posixpath
import re
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs
from fsspec.utils import glob_translate

from lm.errors import RequestError, first_line
from lm.system.files import PATIENCE, File, check_fetched, is_remote


def open_filesystem(source: str) -> tuple[pafs.FileSystem, str, str]:
    """The file system of a path or URL, the path in it, and the prefix that turns such a path into a URL."""
    if not is_remote(source):
        return pafs.LocalFileSystem(), source.removeprefix("file://"), ""
    from lm.system import remote

    return remote.open_filesystem(source)


class Listing(NamedTuple):
    """The files of a path, folder, glob or URL."""

    filesystem: pafs.FileSystem
    path: str  # in the file system: of the file or folder, or of the folder before a glob's first wildcard
    path_as_typed: str  # if the store has commits, `path` is at a commit
    prefix: str  # turns a path into a URL
    files: dict[str, File]  # by their names below `path`, in order; for a file its own name
    is_folder: bool  # whether the source names a folder: not a file, nor a glob
    query: str  # query of the source's URL, with its question mark

    def address(self, file: File) -> str:
        """Path or URL to open a file; if the store has commits, at the commit of the listing."""
        return self.prefix + file.path + self.query

    def name(self, file: File) -> str:
        """Path or URL of a file, as the source was given; it does not depend on the commit."""
        if self.path_as_typed == self.path:
            return self.prefix + file.path
        return self.prefix + self.path_as_typed + file.path.removeprefix(self.path)


def list_files(source: str, patience: float = PATIENCE) -> Listing:
    """List a path, folder, glob or URL; on the Hugging Face Hub, at the latest commit, which the paths then contain."""
    base, pattern = _split_glob(source)
    query = "".join(base.partition("?")[1:]) if is_remote(base) else ""
    filesystem, typed, prefix = open_filesystem(base)
    typed = typed if "://" in typed else posixpath.normpath(typed)
    recursive = pattern is None or "/" in pattern or "**" in pattern
    try:
        path, kind, entries = find_entries(filesystem, typed, recursive, source, patience)
    except OSError as error:
        raise RequestError(f"{source}: cannot be listed ({first_line(error)})") from error
    if kind == pafs.FileType.NotFound:
        raise RequestError(f"{source}: no such file or folder")
    if kind == pafs.FileType.File and pattern is None:
        files = {posixpath.basename(path): entries[0]}
    else:
        files = dict(sorted((posixpath.relpath(file.path, path), file) for file in entries))
    if pattern is not None:
        matches = re.compile(glob_translate(pattern)).fullmatch
        files = {name: file for name, file in files.items() if matches(name)}
        if not files:
            raise RequestError(f"{source}: no file matches")
    is_folder = kind == pafs.FileType.Directory and pattern is None
    return Listing(filesystem, path, typed, prefix, files, is_folder, query)


def find_entries(
    filesystem: pafs.FileSystem, path: str, recursive: bool, source: str, patience: float
) -> tuple[str, pafs.FileType, list[File]]:
    """The path, in a store with commits at its commit; whether it is a file or a folder; and the file, or the folder's
    files. `source`, a path or URL, says whether it is remote."""
    if is_remote(source):
        from lm.system.remote import list_folder

        return list_folder(filesystem, path, recursive, source, patience)
    info = filesystem.get_file_info(path)
    infos = filesystem.get_file_info(_walk(path, recursive)) if info.type == pafs.FileType.Directory else [info]
    files = []
    for file in infos:
        broken_link = file.type == pafs.FileType.NotFound and os.path.islink(file.path)  # reading it is then an error
        if file.type == pafs.FileType.File or broken_link:
            files.append(File(file.path, file.size or 0, file.mtime_ns))
    return path, info.type, files


def _walk(folder: str, recursive: bool) -> list[str]:
    """The paths of all files below a local folder; links to a parent folder are not followed."""

    def fail(error: OSError) -> None:
        raise error

    top = Path(folder).resolve()
    above = {folder: {top, *top.parents}}  # folder -> folders that links in it must not lead to
    paths = []
    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        around = above.pop(place)
        paths += [os.path.join(place, name) for name in files]
        led_to = {os.path.join(place, name): Path(place, name).resolve() for name in folders if recursive}
        above |= {path: {*around, target} for path, target in led_to.items() if target not in around}
        folders[:] = [name for name in folders if os.path.join(place, name) in above]
    return paths


def file_identity(name: str) -> Hashable:
    """A key that is equal for all paths and links of a local file; for a remote file, its URL."""
    if is_remote(name):
        return name
    try:
        info = os.stat(name.removeprefix("file://"))
    except OSError:  # gone since it was listed; reading will report it
        return name
    return info.st_dev, info.st_ino


def _split_glob(source: str) -> tuple[str, str | None]:
    """Cut before the first wildcard: `a/b*/c.txt` -> (`a`, `b*/c.txt`); None without a wildcard, or if it names a file.

    In a URL `?` begins the query, which stays with the folder.
    """
    url, mark, query = source.partition("?") if is_remote(source) else (source, "", "")
    wildcard = re.search(r"[*?\[]", url)
    if wildcard is None or (not is_remote(source) and Path(source).exists()):
        return source, None
    folder, slash, _ = url[: wildcard.start()].rpartition("/")
    return (folder or slash or ".") + mark + query, url[len(folder + slash) :]


def open_file(filesystem: pafs.FileSystem, path: str, name: str, patience: float = PATIENCE) -> pa.NativeFile:
    """Open a file for reading; a remote file, by its `name`, is read with retries."""
    if is_remote(name):
        from lm.system.remote import RemoteFile

        return pa.PythonFile(RemoteFile(filesystem, path, name, patience), mode="r")
    handle = filesystem.open_input_file(path)
    if handle.size() < 1024:  # as all pointers are
        check_fetched(handle.read(64), name)
        handle.seek(0)
    return handle
