"""Test equipment: an HTTP server at the loopback device, which fails some of its requests when told to."""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from typing import Any, Self


class FaultyServer(ThreadingHTTPServer):
    """A server whose handler asks for the fault of each request.

    Attributes:
        met: how often each kind of fault was met; None counts what was answered well.
        well: what stalls goes on once it is set.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type["FaultyHandler"]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.met: Counter = Counter()
        self.well = threading.Event()
        self._faults: Iterator[Any] = repeat(None)
        self._afflicted = re.compile("")
        self._lock = threading.Lock()

    def fail(self, faults: Iterable[Any], requests: str = "") -> None:
        """From now on requests such as `PUT /corpus/a` in which this expression is found meet these faults in turn,
        and then none."""
        with self._lock:
            self._faults, self._afflicted = chain(faults, repeat(None)), re.compile(requests)
            self.met.clear()
            self.well.clear()

    def recover(self) -> None:
        """From now on nothing fails, and what stalls goes on."""
        self.fail([])
        self.well.set()

    def next_fault(self, request: str) -> Any:
        with self._lock:
            fault = next(self._faults) if self._afflicted.search(request) else None
            self.met[getattr(fault, "kind", fault)] += 1
            return fault

    def handle_error(self, request: object, address: object) -> None:
        """A client that went away is no news here."""

    @contextmanager
    def serving(self) -> Iterator[Self]:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield self
        finally:
            self.recover()
            self.shutdown()
            self.server_close()


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
