"""Test equipment: an S3 server."""

import pytest


@pytest.fixture(scope="module")
def s3_client():
    """A client of moto's S3 server at the loopback device, which pyarrow finds by the environment."""
    import boto3
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        settings = {
            "ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test",
            "DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        for name, value in settings.items():
            patch.setenv(f"AWS_{name}", value)
        yield boto3.client("s3")
        server.stop()
