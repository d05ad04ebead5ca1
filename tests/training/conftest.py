"""Most tests here run real trainings of a very small model."""

import pytest
from trainings import make_workplace


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with texts, in which all tests of a file train; the first of them prepares the data."""
    return make_workplace(tmp_path_factory.mktemp("workplace"))
