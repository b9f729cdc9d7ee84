import asyncio
import contextlib
import dataclasses
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout import fakes, models

from intraskill import weights
from intraskill.models.qwen35 import model
from intraskill.rollout.agent import Limits
from intraskill.rollout.collect import Assignment, Rollout, collect_groups
from intraskill.rollout.jax_engine import JaxEngine
from intraskill.rollout.slot_programs import sample
from intraskill.types import EngineError, InputError, Mask, MaskKind, Sampling, Session, ShopError, Status

CONFIG = models.config()
MAX_LENGTH = 96
SIZES = dict(num_slots=4, max_length=MAX_LENGTH, num_prompts=2, decode_block=3, prefill_buckets=(8, 16), prefill_tokens=32)
SAMPLING = Sampling(9, temperature=0.8, stop_ids=(0, 1), banned_ids=(2, 3))
RESULTS = ((7, 8, 9), (10,) * 11, (4, 5))  # what follows each turn


@pytest.fixture(scope="module")
def params():
    return models.params(CONFIG)


@pytest.fixture(scope="module")
def compiled(params):
    """One engine for the module: compiling it is most of what these tests cost."""
    engine = JaxEngine(CONFIG, params, **SIZES, seed=5)
    asyncio.run(engine.warmup())
    assert engine.metrics()["compilations"] == 4  # copy, decode, two buckets
    yield engine
    assert engine.metrics()["compilations"] == 4  # whatever the tests did
    asyncio.run(engine.close())


@pytest.fixture
async def engine(compiled, params, tmp_path):
    """The engine as new: no session, version 0 with `params`."""
    compiled._fail_all("the last test is over")
    compiled._scheduler.counts.clear()
    if compiled._version != 0:
        await compiled.load_weights(weights.publish(tmp_path / "initial", 0, CONFIG, params))
    return compiled


def prompt(seed, length):
    return np.random.default_rng(seed).integers(4, CONFIG.vocab_size, length).tolist()


async def play(engine, name, noise, first, results=RESULTS, sampling=SAMPLING, pause=None):
    """Turns of one session: everything it spelled, which of it was sampled, the log-probs, and the completions."""
    tokens, sampled, logprobs, turns = list(first), [False] * len(first), [], []
    for result in results:
        if pause:
            await asyncio.sleep(pause())
        turn = await engine.generate(tokens, session=Session(name, noise), sampling=sampling)
        tokens += [*turn.ids, *result]
        sampled += [True] * len(turn.ids) + [False] * len(result)
        logprobs += turn.logprobs
        turns.append(turn)
    return tokens, sampled, logprobs, turns


def reference(params, tokens, sampled, sampling=SAMPLING):
    """The sampled tokens' log-probs by one plain forward pass over everything."""
    width = MAX_LENGTH
    row = np.zeros((1, width), np.int32)
    row[0, : len(tokens)] = tokens
    segments = (np.arange(width)[None] < len(tokens)).astype(np.int32)
    index = np.flatnonzero(sampled) - 1
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(index)] = index
    targets = np.take(row[0], padded + 1)
    banned = np.zeros(CONFIG.vocab_size, bool)
    banned[list(sampling.banned_ids)] = True
    positions = np.arange(width, dtype=np.int32)[None]
    scores = _log_probs(params, row, positions, segments, padded, targets, jnp.asarray(banned), sampling.temperature or 1.0)
    return np.asarray(scores)[0, : len(index)]


@jax.jit
def _log_probs(params, tokens, positions, segments, index, targets, banned, temperature):
    hidden = model.forward(params, CONFIG, tokens, positions, segments)
    wanted = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
    scores = jnp.where(banned[None, None], -jnp.inf, model.logits(params, CONFIG, wanted)) / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(scores), targets[:, :, None], axis=-1)[..., 0]


async def test_log_probs_are_those_of_the_plain_forward_pass_over_several_turns(engine, params):
    for seed, length in ((0, 5), (1, 16), (2, 21), (3, 37)):  # below, at and above the buckets, and several pieces
        tokens, sampled, logprobs, turns = await play(engine, f"s{seed}", (seed,), prompt(seed, length))
        np.testing.assert_allclose(logprobs, reference(params, tokens, sampled), atol=1e-4)
        assert all(t.weight_versions == (0,) for t in turns)
        assert [t.finish_reason for t in turns] == ["stop" if t.ids[-1] in SAMPLING.stop_ids else "length" for t in turns]
        assert all(len(t.ids) == 9 for t in turns if t.finish_reason == "length")
        assert not any(i in SAMPLING.stop_ids for t in turns for i in t.ids[:-1]) and not set(SAMPLING.banned_ids) & {i for t in turns for i in t.ids}
    m = engine.metrics()
    assert m["prefilled_tokens"] == m["new_tokens"] and m["evictions"] == 0


async def test_cached_tokens_are_all_but_the_new_ones(engine):
    _, _, _, turns = await play(engine, "s", (1,), prompt(9, 20))
    # the last sampled token of a turn was never fed, so it is new in the next turn, with the result
    lengths = [len(t.ids) for t in turns]
    assert [t.cached_tokens for t in turns] == [0, 20 + lengths[0] - 1, 20 + lengths[0] + 3 + lengths[1] - 1]


async def test_alone_in_a_crowd_shuffled_and_evicted_it_is_the_same_bits(engine):
    shared = prompt(50, 19)
    firsts = {i: shared if i % 3 else prompt(60 + i, 6 + 3 * i) for i in range(9)}
    alone = {}
    for i, first in firsts.items():
        alone[i] = await play(engine, f"alone{i}", (7, i), first)
        await engine.release(Session(f"alone{i}", (7, i)))
    assert engine.metrics()["evictions"] == 0
    engine._scheduler.flush()
    for seed in range(3):
        rng = random.Random(seed)
        order = rng.sample(sorted(firsts), len(firsts))
        crowd = await asyncio.gather(*(play(engine, f"crowd{seed}-{i}", (7, i), firsts[i], pause=lambda rng=rng: rng.random() * 0.02) for i in order))
        for i, (tokens, sampled, logprobs, _) in zip(order, crowd, strict=True):
            assert (tokens, sampled, logprobs) == alone[i][:3]
        engine._fail_all("next crowd")
    # nine episodes in four slots: they were evicted and rebuilt all the time
    assert engine.metrics()["evictions"] > 10


async def test_without_eviction_nothing_is_computed_twice(engine):
    shared = prompt(50, 19)
    await asyncio.gather(*(play(engine, f"s{i}", (3, i), shared) for i in range(4)))
    m = engine.metrics()
    assert m["evictions"] == 0 and m["copied_tokens"] == 3 * 19
    assert m["prefilled_tokens"] + m["copied_tokens"] == m["new_tokens"]


async def test_noise_decides_the_tokens(engine):
    first = prompt(8, 10)
    a, b, c = [await play(engine, n, noise, first, results=((),)) for n, noise in (("a", (1, 1)), ("b", (1, 1)), ("c", (1, 2)))]
    assert a[0] == b[0] and a[2] == b[2] and a[0] != c[0]


async def test_greedy_takes_the_most_likely_allowed_token(engine, params):
    greedy = dataclasses.replace(SAMPLING, temperature=0.0)
    tokens, sampled, logprobs, _ = await play(engine, "g", (1,), prompt(4, 12), sampling=greedy)
    np.testing.assert_allclose(logprobs, reference(params, tokens, sampled, greedy), atol=1e-4)
    for position in np.flatnonzero(sampled)[:6]:
        others = [tokens[:position] + [i] for i in range(4, CONFIG.vocab_size)]
        scores = [reference(params, t, [False] * position + [True], greedy)[0] for t in others]
        assert max(scores) <= logprobs[int(np.sum(sampled[:position]))] + 1e-4


def test_samples_follow_the_distribution():
    n, scores = 6000, np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    keys = np.random.default_rng(0).integers(0, 2**32, (n, 2), np.uint32)
    banned = np.zeros((n, 4), bool)
    banned[:, 3] = True
    rows = jnp.broadcast_to(scores, (n, 4))
    ids, logprobs = jax.jit(sample)(rows, banned, np.full(n, 0.5, np.float32), keys, np.full(n, 17, np.int32))
    expected = np.array([0.25, 0.0625, 0.0225]) / 0.335  # squared for temperature 1/2, without the banned one
    counts = np.bincount(ids, minlength=4)
    assert counts[3] == 0
    assert np.all(np.abs(counts[:3] - n * expected) < 4.5 * np.sqrt(n * expected * (1 - expected)))
    np.testing.assert_allclose(logprobs, np.log(expected)[np.asarray(ids)], atol=1e-5)
    again, _ = jax.jit(sample)(rows, banned, np.full(n, 0.5, np.float32), keys, np.full(n, 18, np.int32))
    assert np.mean(np.asarray(ids) == np.asarray(again)) < 0.7  # another position, other noise


async def test_cancellation_frees_the_slot_and_leaves_the_others_alone(engine):
    expected = await play(engine, "before", (1, 1), prompt(1, 10))
    await engine.release(Session("before", (1, 1)))
    long = dataclasses.replace(SAMPLING, max_new_tokens=60, stop_ids=())
    doomed = [asyncio.create_task(engine.generate(prompt(i, 10), session=Session(f"d{i}", (i,)), sampling=long)) for i in range(6)]
    other = asyncio.create_task(play(engine, "other", (1, 1), prompt(1, 10)))
    await asyncio.sleep(0.02)
    for task in doomed:
        task.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*doomed, return_exceptions=True))
    assert (await other)[:3] == expected[:3]
    assert len(engine._scheduler._free) == 3 and list(engine._scheduler._episodes) == ["other"]
    await engine._runner
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def test_release_ends_a_turn_in_flight(engine):
    long = dataclasses.replace(SAMPLING, max_new_tokens=60, stop_ids=())
    turn = asyncio.create_task(engine.generate(prompt(0, 10), session=Session("s", (0,)), sampling=long))
    await asyncio.sleep(0.01)
    await engine.release(Session("s", (0,)))
    with pytest.raises(EngineError, match="released while a turn was in flight"):
        await turn
    await engine.release(Session("unknown", (0,)))


async def test_the_loop_goes_on_while_the_engine_computes(engine):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    long = dataclasses.replace(SAMPLING, max_new_tokens=60, stop_ids=())
    await engine.generate(prompt(0, 10), session=Session("s", (0,)), sampling=long)
    ticker.cancel()
    assert ticks > 100


async def test_nothing_compiles_in_steady_state(engine):
    await play(engine, "first", (0,), prompt(0, 10))
    compiled = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        await asyncio.gather(
            *(play(engine, f"s{i}", (i,), prompt(i, 3 + 4 * i), sampling=dataclasses.replace(SAMPLING, temperature=0.1 * i)) for i in range(8))
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


# --------------------------------------------------------------------------------------------------------------- weights


@pytest.fixture
def newer(tmp_path):
    params = models.params(CONFIG, seed=1)
    return params, weights.publish(tmp_path / "weights", 1, CONFIG, params)


async def test_loading_replaces_weights_and_everything_computed_with_the_old_ones(engine, newer):
    params, published = newer
    first = prompt(3, 18)
    tokens, sampled, _, _ = await play(engine, "s", (1,), first, results=RESULTS[:1])
    await engine.load_weights(published)
    health = await engine.healthy()
    assert health.ok and health.weight_version == 1 and health.digest == published.digest
    turn = await engine.generate(tokens, session=Session("s", (1,)), sampling=SAMPLING)
    assert turn.cached_tokens == 0 and turn.weight_versions == (1,)
    sampled = [False] * len(tokens) + [True] * len(turn.ids)
    np.testing.assert_allclose(turn.logprobs, reference(params, [*tokens, *turn.ids], sampled), atol=1e-4)
    # and a prompt that was kept before the load is computed again, not copied
    turn = await engine.generate(first, session=Session("t", (1,)), sampling=SAMPLING)
    np.testing.assert_allclose(turn.logprobs, reference(params, [*first, *turn.ids], [False] * 18 + [True] * len(turn.ids)), atol=1e-4)


async def test_a_turn_in_flight_goes_on_with_the_new_weights(engine, params, newer):
    long = Sampling(70, stop_ids=())
    first = prompt(3, 10)
    running = asyncio.create_task(engine.generate(first, session=Session("s", (1,)), sampling=long))
    while engine.metrics()["sampled_tokens"] < 9:
        await asyncio.sleep(0.001)
    await engine.load_weights(newer[1])
    turn = await running
    assert turn.weight_versions == (0, 1) and len(turn.ids) == 70
    mask = [False] * 10 + [True] * 70
    old, new = (reference(p, [*first, *turn.ids], mask, long) for p in (params, newer[0]))
    switch = np.flatnonzero(np.abs(np.array(turn.logprobs) - old) > 1e-4)[0]
    assert switch >= 9
    np.testing.assert_allclose(turn.logprobs[switch:], new[switch:], atol=1e-4)


async def test_a_skipped_load_is_noticed(engine, params, newer, monkeypatch):
    monkeypatch.setattr(weights, "read", lambda published, config: params)
    with pytest.raises(EngineError, match=r"version 1 was not loaded, version 0 is still served: .*loaded parameters have digest"):
        await engine.load_weights(newer[1])
    assert (await engine.healthy()).weight_version == 0
    assert (await engine.healthy()).digest == weights.digest_of(CONFIG, params)


async def test_unreadable_weights_leave_the_engine_as_it_was(engine, params, newer):
    (pathlib.Path(newer[1].path) / "manifest.json").unlink()
    with pytest.raises(EngineError, match="never completely published"):
        await engine.load_weights(newer[1])
    tokens, sampled, logprobs, turns = await play(engine, "s", (1,), prompt(0, 5))
    assert turns[0].weight_versions == (0,)
    np.testing.assert_allclose(logprobs, reference(params, tokens, sampled), atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- faults


async def test_a_failing_call_fails_the_turns_and_not_the_engine(engine, monkeypatch, caplog):
    expected = await play(engine, "before", (1,), prompt(1, 10))
    honest = engine._programs.decode

    def broken(params, state, banned, rows):
        honest(params, state, banned, rows)  # the state is consumed
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._programs, "decode", broken)
    turns = [engine.generate(prompt(i, 10), session=Session(f"s{i}", (i,)), sampling=SAMPLING) for i in range(6)]
    outcomes = await asyncio.gather(*turns, return_exceptions=True)
    assert all(isinstance(o, EngineError) and "device lost" in str(o) for o in outcomes)
    monkeypatch.undo()
    assert (await play(engine, "after", (1,), prompt(1, 10)))[:3] == expected[:3]


async def test_refused_requests(engine):
    async def refused(kind, message, tokens=(5, 6), **sampling):
        with pytest.raises(kind, match=message):
            await engine.generate(tokens, session=Session("s", (0,)), sampling=dataclasses.replace(SAMPLING, **sampling))

    await refused(EngineError, "90 prompt tokens and 9 new ones exceed the engine's max_length, 96", tokens=[5] * 90)
    await refused(EngineError, r"ids in \[0, 96\)", tokens=(5, 96))
    await refused(EngineError, "at least one", tokens=())
    await refused(InputError, "top_p 0.9", top_p=0.9)
    await refused(InputError, "top_k 5", top_k=5)
    await refused(InputError, "9 stop ids", stop_ids=tuple(range(9)))
    await refused(InputError, "leave one to sample", banned_ids=tuple(range(96)))
    assert not engine._scheduler.busy


async def test_dropped_connections_do_not_change_what_is_learned(engine):
    """Groups played against a shop that fails every other call hold the tokens that a healthy shop gets."""
    sampling = dataclasses.replace(fakes.SAMPLING, max_new_tokens=12, banned_ids=tuple(range(4, CONFIG.vocab_size)))

    async def collect(shop):
        rollout = Rollout(engine, shop, fakes.Chat(), sampling, Limits(80, 6), (3, 1), 3, concurrency=6, attempts=30, backoff=0.0)
        assignments = [Assignment(i, fakes.TASK, Mask(MaskKind.SKILL_FREE), ()) for i in range(4)]
        groups = await collect_groups(rollout, assignments, lambda g: None)
        assert not engine._scheduler._episodes
        return [[(t.tokens, t.loss_mask, t.logprobs, t.status, t.reward) for t in g.trajectories] for g in groups]

    def fault(step):
        if step % 2:
            raise ShopError("connection reset")

    healthy, faulty = await collect(fakes.Shop()), fakes.Shop(fault=fault)
    assert await collect(faulty) == healthy
    assert len(faulty.opened) == 12 + (len(faulty.calls) + 1) // 2 > 14
    assert Status.PURCHASE in {status for group in healthy for _, _, _, status, _ in group}
    assert len({tokens for group in healthy for tokens, *_ in group}) > 6


async def test_the_sets_of_banned_ids_are_bounded(engine):
    for i in range(2):
        with contextlib.suppress(InputError):
            await engine.generate([5], session=Session(f"s{i}", (0,)), sampling=dataclasses.replace(SAMPLING, banned_ids=(10 + i,)))
    with pytest.raises(InputError, match="more than 3 different sets"):
        await engine.generate([5], session=Session("s", (0,)), sampling=dataclasses.replace(SAMPLING, banned_ids=(20,)))


def test_more_length_than_the_model_has_positions():
    with pytest.raises(InputError, match="max_length is 96: the model has 64 positions"):
        JaxEngine(models.config(max_positions=64), {}, **SIZES, seed=0)


def test_a_loop_that_ends_with_turns_in_flight_leaves_a_usable_engine(compiled):
    async def abandon():
        long = dataclasses.replace(SAMPLING, max_new_tokens=60, stop_ids=())
        asyncio.get_running_loop().create_task(compiled.generate(prompt(0, 10), session=Session("s", (0,)), sampling=long))
        await asyncio.sleep(0.02)

    asyncio.run(abandon())
    assert not compiled._scheduler.busy
    asyncio.run(play(compiled, "s", (0,), prompt(0, 10)))
