"""What the tests of whole runs and of the entry points share."""

import pytest
from loop import clicker
from loop.fork_server import ForkServer


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("processes"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "clicker"
    clicker.write_checkpoint(path)
    return path
