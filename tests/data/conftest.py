"""Test equipment: an S3 server."""

import pytest
from object_store import object_store


@pytest.fixture(scope="module")
def s3_client():
    """A client of an S3 server with the bucket `corpus`, which pyarrow finds by the environment."""
    with object_store() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        yield store.client
