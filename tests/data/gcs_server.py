"""Test equipment: a server of Google Cloud Storage, in a process of its own, whose requests fail when told to.

Of its own, because pyarrow holds Python's lock while it waits for the first bytes of a file there.
"""

import json
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from trainings import PLACES


class Gcs:
    """A bucket `corpus` behind a proxy (`object_store.Proxy`).

    Attributes:
        query: what makes pyarrow find it, at the end of a URL.
    """

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self._port, proxy = map(int, process.stdout.readline().split())
        self.query = f"?endpoint_override=127.0.0.1:{proxy}&scheme=http"

    def upload(self, folder: Path, prefix: str) -> None:
        """Put all files of a folder below `gs://corpus/<prefix>/`."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = quote(f"{prefix}/{path.relative_to(folder)}", safe="")
            address = f"http://127.0.0.1:{self._port}/upload/storage/v1/b/corpus/o?uploadType=media&name={name}"
            urllib.request.urlopen(urllib.request.Request(address, path.read_bytes(), method="POST")).read()

    def fail(self, faults: list[int | str | None]) -> dict[str, int]:
        """From now on requests meet these one after another; how often each kind was met since the last call."""
        self._process.stdin.write(json.dumps(faults) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def gcs_server() -> Iterator[Gcs]:
    process = subprocess.Popen(
        [sys.executable, __file__], env={"PYTHONPATH": PLACES}, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Gcs(process)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    from gcp_storage_emulator.server import create_server
    from object_store import Proxy

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    create_server("127.0.0.1", port, in_memory=True, default_bucket="corpus").start()
    proxy = Proxy(port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    print(port, proxy.server_address[1], flush=True)
    for line in sys.stdin:
        met = {str(fault): number for fault, number in proxy.met.items()}
        proxy.recover()
        proxy.fail(json.loads(line))
        print(json.dumps(met), flush=True)


if __name__ == "__main__":
    main()
