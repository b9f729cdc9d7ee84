"""Servers on the trainer's own devices: what they lend, when they get it back, and what happens when one is not what it was."""

import contextlib

import pytest
from rollout.proxy import Proxy

from intraskill.rollout.sglang import SGLangEngine
from intraskill.types import EngineError, Session

LENDING = ("/release_memory_occupation", "/resume_memory_occupation")


@contextlib.asynccontextmanager
async def behind(served, tmp_path):
    """A client over one server, with version 1 loaded. The proxy answers for the server's memory, which the server itself cannot give up."""
    proxy = Proxy(served.address)
    proxy.before = lambda path, count: (200, b"null") if path in LENDING else None
    async with proxy.serve() as address:
        engine = SGLangEngine([address], backoff=(0.01, 0.02))
        await engine.load_weights(served.publish(tmp_path, 1))
        proxy.calls.clear()
        try:
            yield engine, proxy
        finally:
            await engine.close()


async def turn(served, engine, name: str):
    return await engine.generate(served.prompt(1, 12), session=Session(name, (1,)), sampling=served.sampling())


async def test_memory_is_lent_while_nobody_generates_and_comes_back_before_the_next_weights(served, tmp_path):
    async with behind(served, tmp_path) as (engine, proxy):
        before = await turn(served, engine, "a")
        proxy.calls.clear()
        async with engine.lending_memory():
            assert proxy.calls == [("/pause_generation", {"mode": "retract"}), ("/release_memory_occupation", {})]
        assert proxy.paths()[2:] == ["/model_info", "/resume_memory_occupation"]
        published = served.publish(tmp_path, 2, served.nudged())
        await engine.load_weights(published)
        assert (await engine.healthy()).digest == published.digest
        after = await turn(served, engine, "b")
        assert before.weight_versions == (1,) and after.weight_versions == (2,)


async def test_memory_comes_back_when_the_update_fails(served, tmp_path):
    async with behind(served, tmp_path) as (engine, proxy):
        with pytest.raises(ZeroDivisionError):
            async with engine.lending_memory():
                raise ZeroDivisionError
        assert proxy.paths()[-1] == "/resume_memory_occupation"


async def test_a_server_that_restarted_meanwhile_is_not_asked_for_what_it_never_lent(served, tmp_path):
    """SGLang's process dies of it."""
    async with behind(served, tmp_path) as (engine, proxy):
        async with engine.lending_memory():
            proxy.after = lambda path, answer: {**answer, "weight_version": "default"} if path == "/model_info" else answer
        assert "/resume_memory_occupation" not in proxy.paths()
        proxy.after = lambda path, answer: answer
        await engine.load_weights(served.publish(tmp_path, 2))
        assert (await turn(served, engine, "a")).weight_versions == (2,)


async def test_a_server_that_cannot_lend_is_one_error(served, tmp_path):
    async with behind(served, tmp_path) as (engine, proxy):
        proxy.before = lambda path, count: (400, b"memory saver is off") if path == "/release_memory_occupation" else None
        with pytest.raises(EngineError, match="refused /release_memory_occupation: status 400: memory saver is off"):
            async with engine.lending_memory():
                pytest.fail("the update must not begin")
