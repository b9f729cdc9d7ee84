"""The server that the client's tests run against: our own engine server with a tiny model, or with INTRASKILL_SGLANG a real SGLang."""

import asyncio
import os

import pytest
from loop.fixtures import launcher
from rollout import models
from rollout.served import Served

from intraskill.rollout import engine_server
from intraskill.rollout.jax_engine import JaxEngine

__all__ = ["launcher"]

CONFIG = models.config()
SIZES = dict(num_slots=4, max_length=96, num_prompts=2, decode_block=3, prefill_buckets=(8, 16), prefill_tokens=32)
SGLANG = os.environ.get("INTRASKILL_SGLANG", "")


@pytest.fixture(scope="session")
def tiny_engine():
    engine = JaxEngine(CONFIG, models.params(CONFIG), **SIZES, seed=5)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
async def served(request):
    """The server as new: nothing in flight, no weights loaded by a client."""
    if SGLANG:
        from sglang_cpu.process import shared

        yield shared(SGLANG).served
        return
    engine: JaxEngine = request.getfixturevalue("tiny_engine")
    async with engine_server.serve(engine, "tiny") as address:
        yield Served(address, CONFIG, models.params(CONFIG), SIZES["max_length"], (0, 1), (2, 3), mean_error=2e-5, max_error=1e-4)
    engine._fail_all("the test is over")
    engine._paused = False
