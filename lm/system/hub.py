"""The Hugging Face hub as a file system: `hf://datasets/OWNER/NAME@REVISION/PATH`, and likewise for models and spaces.

`system/remote` opens it and retries. The token, endpoint and connections are those of huggingface_hub, but not its
`HfApi` and `HfFileSystem`. They ask what is at a path or in a folder without a time limit, and retry by themselves, six
times within each attempt of ours; and after 'too many requests' they wait as long as the Hub says, which counts as an
attempt without an answer. Here each request is made once, within a time limit.
"""

import re
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from lm.errors import RequestError

PATH = re.compile(
    r"((?P<kind>datasets|spaces)/)?(?P<name>[^/@]+/[^/@]+)"
    r"(@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(/(?P<inside>.*))?"
)
REASONS = {  # what the hub calls an error -> what it is
    "RepoNotFound": "there is no such repository, or it is private: look at its name (a data set is "
    "hf://datasets/OWNER/NAME), or set HF_TOKEN to a token that may read it",
    "GatedRepo": "its owner grants access: ask for it on its page, and set HF_TOKEN to your token",
    "RevisionNotFound": "there is no such revision (the branch, tag or commit after @)",
    "EntryNotFound": "there is no such file or folder",
}


class Place(NamedTuple):
    kind: str  # "datasets", "spaces" or "models"
    name: str  # OWNER/NAME
    revision: str  # a branch, tag or commit
    inside: str  # path inside the repository; empty for the repository

    @property
    def root(self) -> str:
        """The path of the repository in the file system."""
        return f"{'' if self.kind == 'models' else f'{self.kind}/'}{self.name}@{quote(self.revision, safe='')}"


class HubFileSystem(AbstractFileSystem):
    """Read-only file system of repositories on the Hub."""

    protocol = "hf"
    cachable = False  # `hub` keeps the only instance

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, dict[str, Any]] = {}  # path at a commit, which cannot change -> `info`

    def __reduce__(self) -> tuple:
        return hub, ()

    def pin(self, path: str) -> str:
        """The path at the current commit of its revision, so that all later reads have the same content."""
        place = _place(path)
        about = _ask(f"api/{place.kind}/{place.name}/revision/{quote(place.revision, safe='')}").json()
        return "/".join(filter(None, (place._replace(revision=about["sha"]).root, place.inside)))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """`name`, `type` and `size` of a file or folder, and the `ETag` of a file."""
        if path in self.known:
            return self.known[path]
        place = _place(path)
        if not place.inside:
            return {"name": path, "type": "directory", "size": 0}
        address = f"api/{place.kind}/{place.name}/paths-info/{quote(place.revision, safe='')}"
        entries = _ask(address, "POST", data={"paths": [place.inside], "expand": False}).json()
        if not entries:
            raise FileNotFoundError(REASONS["EntryNotFound"])
        return self._note(place, entries[0])

    def find(self, path: str, maxdepth: int | None = None, **_: Any) -> dict[str, dict[str, Any]]:
        """All files below a folder, or, with a `maxdepth` of 1, directly in it: path -> `info`."""
        place = _place(path)
        inside = f"/{quote(place.inside, safe='')}" if place.inside else ""
        address = f"api/{place.kind}/{place.name}/tree/{quote(place.revision, safe='')}{inside}"
        page: str | None = f"{address}?recursive={str(maxdepth is None).lower()}"
        entries: list[dict[str, Any]] = []
        while page is not None:
            answer = _ask(page)
            entries += [self._note(place, entry) for entry in answer.json()]
            page = answer.links.get("next", {}).get("url")
        return {info["name"]: info for info in entries if info["type"] == "file"}

    def _note(self, place: Place, entry: dict[str, Any]) -> dict[str, Any]:
        info = {"name": f"{place.root}/{entry['path']}", "type": entry["type"], "size": entry["size"]}
        if entry["type"] == "file":
            info["ETag"] = entry["oid"]  # Git's hash of the file, or of the LFS pointer with its SHA-256
        if re.fullmatch("[0-9a-f]{40}", place.revision):
            self.known[info["name"]] = info
        return info

    def _open(self, path: str, mode: str = "rb", **_: Any) -> "HubFile":
        return HubFile(self, path, cache_type="none", size=self.info(path)["size"])


class HubFile(AbstractBufferedFile):
    """A file on the Hub; every read is a separate request."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        place = _place(self.path)
        kind = "" if place.kind == "models" else f"{place.kind}/"
        answer = _ask(
            f"{kind}{place.name}/resolve/{quote(place.revision, safe='')}/{quote(place.inside)}",
            headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"},
        )
        return answer.content if answer.status_code == 206 else answer.content[start:end]


@cache
def hub() -> HubFileSystem:
    return HubFileSystem()


def _place(path: str) -> Place:
    parts = PATH.fullmatch(path.strip("/"))
    if parts is None or parts["name"].startswith(("datasets/", "spaces/")):
        raise RequestError(f"hf://{path} names no repository; the form is hf://datasets/OWNER/NAME/PATH")
    revision = unquote(parts["revision"] or "main")
    return Place(parts["kind"] or "models", parts["name"], revision, (parts["inside"] or "").strip("/"))


def _ask(page: str, method: str = "GET", headers: dict[str, str] = {}, **options: Any) -> Any:
    """Make one request to the Hub, to a path below its endpoint or to a full address.

    FileNotFoundError or PermissionError: the Hub's answer about the repository, revision or file.
    """
    from huggingface_hub import constants  # takes a while to import
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    address = page if "://" in page else f"{constants.ENDPOINT}/{page}"
    sent = {**build_hf_headers(), **headers}
    try:
        answer = get_session().request(
            method, address, headers=sent, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, **options
        )
    except OfflineModeIsEnabled as error:
        raise RequestError(f"HF_HUB_OFFLINE is set, and {address} was asked for: unset it") from error
    if answer.status_code in (401, 403, 404):
        what, message = (answer.headers.get(f"X-Error-{part}", "") for part in ("Code", "Message"))
        token = "; look at HF_TOKEN, and at what `hf auth login` stored" if answer.status_code == 401 else ""
        reason = REASONS.get(what) or f"status {answer.status_code}, {message or 'refused'}{token}"
        missing = answer.status_code == 404 or what == "RepoNotFound"  # names that never existed give 401
        raise FileNotFoundError(reason) if missing else PermissionError(reason)
    hf_raise_for_status(answer)
    return answer
