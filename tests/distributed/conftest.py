import pytest
from loop.fork_server import ForkServer


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """Starts processes that have one device each."""
    server = ForkServer(tmp_path_factory.mktemp("processes"), JAX_NUM_CPU_DEVICES="1")
    yield server
    server.close()
