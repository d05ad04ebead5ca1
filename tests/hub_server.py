"""Test equipment: a server at the loopback device that speaks the Hugging Face hub's protocol, and fails when told to.

It has what reading needs: a repository's commit, what is at given paths, the tree in pages, and files with ranges, the
large ones (LFS) by a redirect to another host. HF_ENDPOINT is how clients find it; huggingface_hub reads that when it is
imported, so tests either start commands or set its constant.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from faulty_server import FaultyHandler, FaultyServer

PAGE = 3  # entries of a page of the tree; the hub's have 1,000
LFS_SUFFIXES = (".parquet", ".gz", ".bin")
MESSAGES = {403: "Forbidden", 429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}


class Fault(NamedTuple):
    """How a request fails."""

    kind: int | str  # a status such as 429 or 503; "stall", no answer; "cut", half of the body that was announced
    headers: Mapping[str, str] = {}


class Hub(FaultyServer):
    """Repositories of data sets.

    Attributes:
        repositories: `owner/name` -> its commits, each a dict of path -> content; the last one is `main`, and here
            the branch with the data set as Parquet too.
        private: repositories that need `token`.
        environment: what makes a process find it.
        requests: how often each was made, such as `GET /api/datasets/o/n/tree/main`; those that failed too.
        sent: bytes of files that were sent.
    """

    token = "hf_test"

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.environment = {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": ""}
        self.sent = 0
        self.requests: Counter[str] = Counter()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repository: str, files: Mapping[str, bytes | None] | Path) -> str:
        """Add a commit in which these files changed, or are gone (None); its id."""
        if isinstance(files, Path):
            files = {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        commits = self.repositories.setdefault(repository, [])
        changed = {**(commits[-1] if commits else {}), **files}
        commits.append({path: content for path, content in changed.items() if content is not None})
        return self.commit_id(repository, len(commits) - 1)

    def commit_id(self, repository: str, number: int) -> str:
        return hashlib.sha1(f"{repository} {number}".encode()).hexdigest()

    def files(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit that a revision means, and its files."""
        commits = self.repositories[repository]
        ids = [self.commit_id(repository, number) for number in range(len(commits))]
        revision = ids[-1] if revision in ("main", "refs/convert/parquet") else revision
        return (revision, commits[ids.index(revision)]) if revision in ids else None

    def fail(self, faults: Iterable[Fault | None], requests: str = "") -> None:
        super().fail(faults, requests)
        self.requests.clear()
        self.sent = 0

    def next_fault(self, request: str) -> Fault | None:
        with self._lock:
            self.requests[request] += 1
        return super().next_fault(request)

    def count(self, requests: str) -> int:
        """How many requests were made in which this expression is found."""
        with self._lock:
            return sum(number for request, number in self.requests.items() if re.search(requests, request))


class _Handler(FaultyHandler):
    def answer(self) -> None:
        url = urlsplit(self.path)
        form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.query = parse_qs(f"{url.query}&{form}")
        fault = self.server.next_fault(f"{self.command} {url.path}")
        self.cut = fault is not None and fault.kind == "cut"
        if fault is not None and fault.kind == "stall":
            self.server.well.wait(60)
            self.close_connection = True
            return
        if fault is not None and not self.cut:
            self.send(fault.kind, json.dumps({"error": MESSAGES[fault.kind]}).encode(), fault.headers)
            return
        for pattern, method in ROUTES:
            if found := re.fullmatch(pattern, url.path):
                method(self, **{name: unquote(value or "") for name, value in found.groupdict().items()})
                return
        self.refuse(404, "EntryNotFound", "no such page")

    do_GET = do_HEAD = do_POST = answer

    # ---- pages

    def info(self, repository: str, revision: str = "main") -> None:
        if found := self.open(repository, revision):
            self.send_json({"id": repository, "sha": found[0]})

    def paths_info(self, repository: str, revision: str) -> None:
        if found := self.open(repository, revision):
            wanted = [path.strip("/") for path in self.query.get("paths", [])]
            self.send_json([entry for path, entry in _entries(found[1]).items() if path in wanted])

    def tree(self, repository: str, revision: str, folder: str) -> None:
        """A folder in pages, with a cursor in the `Link` to the next."""
        if not (found := self.open(repository, revision)):
            return
        below, recursive = f"{folder}/" if folder else "", self.query.get("recursive", ["false"])[0].lower() == "true"
        entries = [
            entry for path, entry in sorted(_entries(found[1]).items())
            if path.startswith(below) and (recursive or "/" not in path.removeprefix(below))
        ]  # fmt: skip
        if folder and not entries:
            self.refuse(404, "EntryNotFound", f"{folder} does not exist on {revision!r}")
            return
        start = int(self.query.get("cursor", ["0"])[0])
        place = f"{self.server.endpoint}{urlsplit(self.path).path}?recursive={recursive}&cursor={start + PAGE}"
        more = {"Link": f'<{place}>; rel="next"'} if start + PAGE < len(entries) else {}
        self.send_json(entries[start : start + PAGE], more)

    def resolve(self, repository: str, revision: str, path: str) -> None:
        if not (found := self.open(repository, revision)):
            return
        commit, files = found
        if path not in files:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        entry = _entries(files)[path]
        about = {"X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
        if "lfs" not in entry:
            self.send_file(files[path], about)
            return
        about |= {"X-Linked-Size": str(entry["size"]), "X-Linked-ETag": f'"{entry["lfs"]["oid"]}"'}
        port = self.server.server_address[1]  # another host, to which no token may go
        self.send(302, b"", {**about, "Location": f"http://localhost:{port}/lfs/{repository}/{commit}/{path}"})

    def lfs(self, repository: str, revision: str, path: str) -> None:
        if "Authorization" in self.headers:
            self.refuse(400, "InvalidRequest", "Only one auth mechanism allowed")
        else:
            self.send_file(self.server.files(repository, revision)[1][path], {"Accept-Ranges": "bytes"})

    # ---- answers

    def open(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files; what is wrong has been answered where there are none."""
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {self.server.token}"):
            self.refuse(401, None, "Invalid credentials in Authorization header")
        elif repository not in self.server.repositories or (repository in self.server.private and not authorization):
            # Who has a token learns that there is none; others are asked for one, as for a private one.
            self.refuse(404 if authorization else 401, "RepoNotFound", "Repository not found")
        elif (found := self.server.files(repository, revision)) is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return found
        return None

    def refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.send(status, json.dumps({"error": message}).encode(), headers)

    def send_json(self, content: object, headers: Mapping[str, str] = {}) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json", **headers})

    def send_file(self, content: bytes, headers: Mapping[str, str]) -> None:
        wanted, status = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")), 200
        if wanted:
            start, stop = int(wanted[1]), int(wanted[2] or len(content) - 1) + 1
            headers = {**headers, "Content-Range": f"bytes {start}-{min(stop, len(content)) - 1}/{len(content)}"}
            content, status = content[start:stop], 206
        self.server.sent += len(content)
        self.send(status, content, headers)

    def send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.head(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self.cut else body)
        self.close_connection = self.close_connection or self.cut


REPOSITORY = r"(?P<repository>[^/]+/[^/]+)"
ROUTES: list[tuple[str, Callable]] = [
    (f"/api/datasets/{REPOSITORY}", _Handler.info),
    (f"/api/datasets/{REPOSITORY}/revision/(?P<revision>[^/]+)", _Handler.info),
    (f"/api/datasets/{REPOSITORY}/paths-info/(?P<revision>[^/]+)", _Handler.paths_info),
    (f"/api/datasets/{REPOSITORY}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    (f"/datasets/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
    (f"/lfs/{REPOSITORY}/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.lfs),
]


def _entries(files: Mapping[str, bytes]) -> dict[str, dict]:
    """What the hub says about every file and folder, by its path."""
    entries: dict[str, dict] = {}
    for path, content in files.items():
        for folder in list(Path(path).parents)[:-1]:
            entries[str(folder)] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": str(folder)}
        entry = {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}
        if path.endswith(LFS_SUFFIXES):
            oid = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
        entries[path] = entry
    return entries


def hub_server() -> AbstractContextManager[Hub]:
    """A hub without repositories."""
    return Hub().serving()
