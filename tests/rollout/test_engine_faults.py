"""Engines that break their promises, behind a proxy or as real processes: a turn is asked for again, or its episode is technical."""

import asyncio
import contextlib
import dataclasses
import math
import os
import random
import signal
from collections.abc import Sequence

import numpy as np
import pytest
from rollout import engine_process, fakes, models
from rollout.proxy import Proxy
from rollout.served import Served

from intraskill.models.qwen35 import hf
from intraskill.rollout import engine_server
from intraskill.rollout.agent import Limits, run_episode
from intraskill.rollout.collect import Assignment, Rollout, collect_groups
from intraskill.rollout.jax_engine import JaxEngine
from intraskill.rollout.replica import Limits as EngineLimits
from intraskill.rollout.sglang import SGLangEngine
from intraskill.types import EngineError, InputError, Mask, MaskKind, Published, Session, Status

BACKOFF = (0.01, 0.02, 0.04, 0.08)


@contextlib.asynccontextmanager
async def behind(served: Served, tmp_path, *, more: Sequence[JaxEngine] = (), load: bool = True, **limits: float):
    """A proxy in front of the server, and of one more for each engine in `more`; a client over all of them, and version 1 loaded."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [served.address, *[await stack.enter_async_context(engine_server.serve(e, "more")) for e in more]]
        made = [Proxy(address) for address in servers]
        addresses = [await stack.enter_async_context(p.serve()) for p in made]
        engine = SGLangEngine(addresses, backoff=BACKOFF, limits=EngineLimits(**limits))
        stack.push_async_callback(engine.close)
        if load:
            await engine.load_weights(served.publish(tmp_path, 1))
        yield (engine, *made)
    assert not engine._recoveries and not engine._turns and engine._http is None


async def turn(served: Served, engine: SGLangEngine, name: str = "s", **sampling):
    return await engine.generate(served.prompt(1, 12), session=Session(name, (1,)), sampling=served.sampling(**sampling))


async def episode(served: Served, engine: SGLangEngine):
    """One episode through the agent, in which every turn is a call."""
    sampling = dataclasses.replace(fakes.SAMPLING, max_new_tokens=12, banned_ids=tuple(range(4, served.config.vocab_size)))
    return await run_episode(engine, fakes.Shop(), fakes.Chat(), fakes.TASK, (), Session("e", (3,)), sampling, Limits(90, 6))


# ------------------------------------------------------------------------------------------------- asked for again, same tokens


@pytest.mark.parametrize(
    "fault", [(500, b"boom"), (503, b""), (408, b""), (429, b""), (200, b'{"output_ids": [5, 6'), (200, b"null"), "drop"], ids=str
)
async def test_a_passing_failure_is_retried_and_changes_nothing(served, tmp_path, fault):
    async with behind(served, tmp_path) as (engine, proxy):
        expected = await turn(served, engine)
        await engine.release(Session("s", (1,)))
        proxy.before = lambda path, count: fault if path == "/generate" and count in (2, 3) else None
        again = await turn(served, engine)
        assert (again.ids, again.logprobs) == (expected.ids, expected.logprobs) and proxy.counts["/generate"] == 4


async def test_an_answer_lost_on_the_way_is_sampled_again_from_the_start(served, tmp_path):
    """The server has computed the turn; the client never saw it. The second try continues the client's tokens, not the server's."""
    async with behind(served, tmp_path) as (engine, proxy):
        expected = await turn(served, engine)
        await engine.release(Session("s", (1,)))
        proxy.after = lambda path, answer: b'{"output_ids"' if path == "/generate" and proxy.counts[path] == 2 else answer
        again = await turn(served, engine)
        assert (again.ids, again.logprobs, len(again.ids) <= 9) == (expected.ids, expected.logprobs, True)


async def test_a_failure_that_stays_ends_as_one_error(served, tmp_path):
    async with behind(served, tmp_path) as (engine, proxy):
        proxy.before = lambda path, count: (500, b"out of memory") if path == "/generate" else None
        with pytest.raises(EngineError, match="failed 5 times, last: .*status 500: out of memory"):
            await turn(served, engine)
        assert proxy.counts["/generate"] == len(BACKOFF) + 1
        proxy.before = lambda path, count: None
        assert (await turn(served, engine)).ids


async def test_a_turn_that_cannot_be_computed_is_refused_once(served, tmp_path):
    async with behind(served, tmp_path) as (engine, proxy):
        for ids, sampling in (([5, served.config.vocab_size], {}), ([], {}), ([5], {"top_p": 0.5})):
            with pytest.raises(EngineError, match="refused /generate: status 400"):
                await engine.generate(ids, session=Session("s", (0,)), sampling=served.sampling(**sampling))
        assert proxy.counts["/generate"] == 3 and (await turn(served, engine, "t")).ids


async def test_three_connections_in_ten_dropped_change_no_token(served, tmp_path):
    sampling = dataclasses.replace(fakes.SAMPLING, max_new_tokens=12, banned_ids=tuple(range(4, served.config.vocab_size)))

    async def collect(engine):
        rollout = Rollout(engine, fakes.Shop(), fakes.Chat(), sampling, Limits(80, 6), (3, 1), 3, concurrency=6, attempts=30, backoff=0.0)
        groups = await collect_groups(rollout, [Assignment(i, fakes.TASK, Mask(MaskKind.SKILL_FREE), ()) for i in range(3)], lambda g: None)
        return [[(t.tokens, t.loss_mask, t.logprobs, t.status, t.reward) for t in g.trajectories] for g in groups]

    async with behind(served, tmp_path) as (engine, proxy):
        healthy = await collect(engine)
        rng, dropped = random.Random(0), 0

        def drop(path, count):
            nonlocal dropped
            hit = rng.random() < 0.3
            dropped += hit
            return "drop" if hit else None

        proxy.before = drop
        assert await collect(engine) == healthy and dropped > 5
        await engine.load_weights(served.publish(tmp_path, 2, served.nudged()))
        assert not engine._sessions


# -------------------------------------------------------------------------------------------------------- never trained on


async def test_log_probs_that_are_no_numbers_make_the_episode_technical(served, tmp_path):
    def spoil(path, answer):
        if path == "/generate":
            answer["meta_info"]["output_token_logprobs"][-1][0] = None  # how SGLang's JSON spells NaN
        return answer

    async with behind(served, tmp_path) as (engine, proxy):
        assert (await episode(served, engine)).status != Status.TECHNICAL
        proxy.after = spoil
        broken = await episode(served, engine)
        assert broken.status == Status.TECHNICAL and "nan is not finite" in broken.error and not broken.turns


async def test_more_tokens_than_asked_make_the_episode_technical(served, tmp_path):
    def lengthen(path, answer):
        if path == "/generate":
            answer["output_ids"] = [3] * 13
            answer["meta_info"].update(output_token_logprobs=[[-1.0, 3, None]] * 13, finish_reason={"type": "length"})
        return answer

    async with behind(served, tmp_path) as (engine, proxy):
        proxy.after = lengthen
        broken = await episode(served, engine)
        assert broken.status == Status.TECHNICAL and "13 tokens where at most 12 were asked" in broken.error


async def test_tokens_of_other_weights_than_told_are_not_taken(served, tmp_path):
    def mislabel(path, answer):
        if path == "/generate":
            answer["meta_info"]["weight_versions"] = [{"version": "1"}, {"version": "7"}]
        return answer

    async with behind(served, tmp_path) as (engine, proxy):
        proxy.after = mislabel
        with pytest.raises(EngineError, match=r"sampled with weights \(1, 7\), it was told to serve \[1\]"):
            await turn(served, engine)


async def test_ids_that_are_not_those_of_the_log_probs_are_not_taken(served, tmp_path):
    def shift(path, answer):
        if path == "/generate":
            answer["output_ids"] = answer["output_ids"][::-1] + [9]
        return answer

    async with behind(served, tmp_path) as (engine, proxy):
        proxy.after = shift
        with pytest.raises(EngineError, match="not the ids of output_token_logprobs"):
            await turn(served, engine)


# ---------------------------------------------------------------------------------------------------------- several replicas


async def test_sessions_stay_and_spread_evenly(served, tiny_engine, tmp_path):
    async with behind(served, tmp_path, more=[tiny_engine] * 2) as (engine, *proxies):
        for _ in range(2):
            for i in range(6):
                await engine.generate(served.prompt(1, 12), session=Session(f"s{i}", (i,)), sampling=served.sampling(max_new_tokens=1))
        rids = [{body["rid"].partition("/")[0] for path, body in p.calls if path == "/generate"} for p in proxies]
        assert [len(r) for r in rids] == [2, 2, 2] and len(set.union(*rids)) == 6
        for i in range(6):
            await engine.release(Session(f"s{i}", (i,)))
        assert not engine._sessions


async def test_a_hung_replica_costs_its_own_turns_a_time_limit_only(served, tiny_engine, tmp_path):
    async with behind(served, tmp_path, more=[tiny_engine], turn_seconds=20.0) as (engine, first, second):
        for i in range(2):
            await turn(served, engine, f"warm{i}")
        first.before = lambda path, count: "hang" if path == "/generate" else None
        turns = await asyncio.gather(*(turn(served, engine, f"s{i}", max_new_tokens=1) for i in range(4)))
        assert all(len(t.ids) == 1 for t in turns)
        aborted = [body["rid"] for path, body in first.calls if path == "/abort_request"]
        assert aborted, "what hangs there is aborted, should the server come back"


async def test_a_replica_that_restarted_gets_the_weights_before_its_first_turn(served, tmp_path):
    """After a restart a server calls its weights "default"."""
    async with behind(served, tmp_path) as (engine, proxy):
        await turn(served, engine)
        restarted = False

        def forget(path, answer):
            if path == "/model_info" and restarted and "/update_weight_version" not in proxy.paths()[since:]:
                answer["weight_version"] = "default"
            return answer

        restarted, since, proxy.after = True, len(proxy.calls), forget
        proxy.before = lambda path, count: "drop" if path == "/generate" and count == 2 else None
        assert (await turn(served, engine, "later")).weight_versions == (1,)
        paths = proxy.paths()[since:]
        assert paths.index("/update_weights_from_tensor") < paths.index("/get_weights_by_name") < paths.index("/continue_generation")
        assert paths[paths.index("/continue_generation") + 1] == "/generate"


async def test_a_replica_that_restarted_unseen_is_noticed_by_its_answer(served, tmp_path):
    async with behind(served, tmp_path) as (engine, proxy):
        await turn(served, engine)
        since = len(proxy.calls)

        def forget(path, answer):
            if "/update_weight_version" not in proxy.paths()[since:]:
                if path == "/model_info":
                    answer["weight_version"] = "default"
                if path == "/generate":
                    answer["meta_info"]["weight_versions"] = [{"version": "default"}]
            return answer

        proxy.after = forget
        assert (await turn(served, engine, "later")).weight_versions == (1,)
        assert proxy.paths()[since:].count("/update_weights_from_tensor") == 1


async def test_a_first_turn_that_compiles_is_waited_for(served, tmp_path):
    async with behind(served, tmp_path, turn_seconds=0.5, start_seconds=300.0) as (engine, proxy):
        proxy.before = lambda path, count: 1.5 if path == "/generate" and count == 1 else None
        assert (await turn(served, engine)).ids
        assert proxy.counts["/generate"] == 1, "longer than a turn may take, and not asked for twice"
        assert "/health" not in proxy.paths(), "that route computes a token, and calls a server that compiles unhealthy"


async def test_a_server_that_is_not_there_at_the_start_is_one_error(served, tmp_path):
    async with behind(served, tmp_path, load=False, start_seconds=0.2) as (engine, proxy):
        proxy.before = lambda path, count: "drop"
        with pytest.raises(EngineError, match="start the server, or correct engine.addresses"):
            await engine.load_weights(served.publish(tmp_path, 1))


async def test_a_server_that_stays_away_is_one_error(served, tmp_path):
    async with behind(served, tmp_path, start_seconds=0.3) as (engine, proxy):
        proxy.before = lambda path, count: "drop"
        with pytest.raises(EngineError, match="no engine serves .*look at the servers' logs"):
            await turn(served, engine)
        with pytest.raises(EngineError, match="no engine serves"):
            await engine.load_weights(served.publish(tmp_path, 2, served.nudged()))
        health = await engine.healthy()
        assert not health.ok and "is away" in health.detail


async def test_a_run_goes_on_without_a_replica_and_it_catches_up_later(served, tiny_engine, tmp_path):
    async with behind(served, tmp_path, more=[tiny_engine]) as (engine, first, second):
        first.before = lambda path, count: "drop"
        two = served.publish(tmp_path, 2, served.nudged())
        await engine.load_weights(two)
        assert [r.serving for r in engine._replicas] == [False, True]
        assert (await turn(served, engine)).weight_versions == (2,)
        first.before = lambda path, count: None
        while not engine._replicas[0].serving:
            await asyncio.sleep(0.01)
        assert engine._replicas[0].versions[-1] == 2


async def test_an_old_server_is_refused(served, tmp_path):
    async with behind(served, tmp_path, load=False) as (engine, proxy):
        proxy.after = lambda path, answer: {**answer, "version": "0.5.20.post1"} if path == "/server_info" else answer
        with pytest.raises(EngineError, match="runs SGLang 0.5.20.post1: 0.5.21 or newer is needed"):
            await engine.load_weights(served.publish(tmp_path, 1))


def test_time_limits_that_cannot_be():
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="positive and finite"):
            EngineLimits(turn_seconds=value)


# ------------------------------------------------------------------------------------------------------------ real processes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    config = models.config(max_positions=128)
    hf.save_hf(path, config, models.params(config))
    return path


class Engines:
    """Engine servers as processes of their own."""

    def __init__(self, launcher, checkpoint):
        self._launcher, self._checkpoint = launcher, checkpoint
        self.processes = []

    def start(self, port: int = 0) -> str:
        process, address = engine_process.start(self._launcher, self._checkpoint, max_length=96, slots=4, port=port)
        self.processes.append(process)
        return address

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                os.kill(process.pid, signal.SIGTERM)
        assert all(process.wait() in (0, -signal.SIGKILL) for process in self.processes)


@pytest.fixture
def engines(launcher, checkpoint):
    made = Engines(launcher, checkpoint)
    yield made
    made.stop()


@pytest.mark.timeout(900)
async def test_an_engine_killed_or_stopped_mid_generation_costs_nothing_but_time(engines, checkpoint, tmp_path):
    """Two processes: one is killed while it generates and started again, the other stands still for a while. The groups are those of a quiet run."""
    addresses = [engines.start(), engines.start()]
    config, params = hf.load_hf(checkpoint, param_dtype="float32")
    served = Served(addresses[0], config, params, 96, (0, 1), (2, 3), 0, 0)
    sampling = dataclasses.replace(fakes.SAMPLING, max_new_tokens=12, banned_ids=tuple(range(4, config.vocab_size)))
    published: Published = served.publish(tmp_path, 1)

    async def collect(engine, groups, on_group=lambda g: None):
        rollout = Rollout(engine, fakes.Shop(), fakes.Chat(), sampling, Limits(80, 6), (3, 1), 3, concurrency=8, attempts=10, backoff=0.05)
        found = await collect_groups(rollout, [Assignment(i, fakes.TASK, Mask(MaskKind.SKILL_FREE), ()) for i in range(groups)], on_group)
        return [[(t.tokens, t.logprobs, t.status) for t in g.trajectories] for g in found]

    engine = SGLangEngine(addresses, limits=EngineLimits(turn_seconds=20.0))
    try:
        await engine.load_weights(published)
        quiet = await collect(engine, 8)
        battered = asyncio.create_task(collect(engine, 8))
        while not engine._turns:
            await asyncio.sleep(0.001)
        os.kill(engines.processes[0].pid, signal.SIGKILL)
        engines.processes[0].wait()
        os.kill(engines.processes[1].pid, signal.SIGSTOP)
        restarted = await asyncio.to_thread(engines.start, int(addresses[0].rpartition(":")[2]))
        assert restarted == addresses[0]
        os.kill(engines.processes[1].pid, signal.SIGCONT)
        # A replica that has lost a prefix computes it in one stretch, so log-probs may differ in their last bits.
        for found, expected in zip(await battered, quiet, strict=True):
            assert [(tokens, status) for tokens, _, status in found] == [(tokens, status) for tokens, _, status in expected]
            for (_, a, _), (_, b, _) in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4)
        assert (await engine.healthy()).digest == published.digest
    finally:
        await engine.close()
    assert not engine._turns and not engine._recoveries
