"""Test equipment: a real S3 server, and a proxy before it that fails in the ways that object stores do."""

import http.client
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faulty_server import FaultyHandler, FaultyServer

ERROR = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>try again later</Message></Error>'
CODES = {403: b"AccessDenied", 429: b"TooManyRequests", 500: b"InternalError", 503: b"SlowDown"}


class Proxy(FaultyServer):
    """Hands requests on to a server, and fails some of them.

    A fault is 403, 429, 500 or 503; `stall`, no answer; `reset`; `cut`, half of the body that was announced; `lie`,
    half of it, announced as such; `drip`, a byte now and then.
    """

    def __init__(self, port: int) -> None:
        super().__init__(_Handler)
        self.behind = port


class _Handler(FaultyHandler):
    def answer(self) -> None:
        fault = self.server.next_fault(f"{self.command} {self.path}")
        if fault == "stall":
            self.server.well.wait(60)
            fault = "reset"
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if fault in CODES:
            body = ERROR % CODES[fault]
            self.head(fault, {"Content-Type": "application/xml", "Content-Length": str(len(body))})
            self.wfile.write(b"" if self.command == "HEAD" else body)
            return
        status, headers, body = self.behind()
        if fault == "lie":
            body = body[: len(body) // 2]
        if self.command != "HEAD":
            headers["Content-Length"] = str(len(body))
        self.head(status, headers)
        if self.command == "HEAD":
            return
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif fault == "drip":
            for place in range(len(body)):
                self.wfile.write(body[place : place + 1])
                self.server.well.wait(0.2)
        else:
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def behind(self) -> tuple[int, dict[str, str], bytes]:
        """What the server behind answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            connection.request(self.command, self.path, self.sent(), headers=headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        headers = {name: value for name, value in response.getheaders() if name.lower() != "transfer-encoding"}
        return response.status, headers, body

    def sent(self) -> bytes:
        """The body of the request."""
        if "Transfer-Encoding" not in self.headers:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


class Store:
    """A bucket `corpus` behind a `proxy`."""

    def __init__(self, server_port: int, proxy: Proxy) -> None:
        self.proxy = proxy
        self.environment = {  # with which a process finds it
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}", "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        import boto3

        self.client = boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{server_port}", aws_access_key_id="test",
            aws_secret_access_key="test", region_name="us-east-1",
        )  # fmt: skip
        self.client.create_bucket(Bucket="corpus")

    def names(self, prefix: str) -> set[str]:
        """The objects below `s3://corpus/<prefix>/`."""
        found = self.client.list_objects_v2(Bucket="corpus", Prefix=f"{prefix}/").get("Contents", [])
        return {entry["Key"].removeprefix(f"{prefix}/") for entry in found if not entry["Key"].endswith("/")}

    def upload(self, folder: Path, prefix: str) -> None:
        """Put all files of a folder below `s3://corpus/<prefix>/`."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.upload_file(str(path), "corpus", f"{prefix}/{path.relative_to(folder).as_posix()}")


@contextmanager
def object_store() -> Iterator[Store]:
    """A server and its proxy on this machine."""
    from moto.server import ThreadedMotoServer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        with Proxy(port).serving() as proxy:
            yield Store(port, proxy)
    finally:
        server.stop()
