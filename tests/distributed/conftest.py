import os

import pytest
from loop.fork_server import ROOT, ForkServer

# XLA's own patience with a process that a busy machine keeps waiting is 40 s.
PATIENCE = " ".join(f"--xla_cpu_collective_{name}_seconds=1200" for name in ("timeout", "call_warn_stuck_timeout", "call_terminate_timeout"))
ENVIRONMENT = {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": PATIENCE, "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))}


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """Starts processes that have one device each."""
    server = ForkServer(tmp_path_factory.mktemp("processes"), **ENVIRONMENT)
    yield server
    server.close()
