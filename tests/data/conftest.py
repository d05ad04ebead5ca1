"""Test equipment: an S3 server."""

import socket

import pytest


@pytest.fixture(scope="module")
def s3_client():
    """A client of moto's S3 server at the loopback device, which pyarrow finds by the environment."""
    import boto3
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
        server.start()
        settings = {
            "ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test",
            "DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        for name, value in settings.items():
            patch.setenv(f"AWS_{name}", value)
        yield boto3.client("s3")
        server.stop()
