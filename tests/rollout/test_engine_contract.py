"""The client against a server it cannot tell apart: our own here, a real SGLang in `make test-sglang`."""

import asyncio
import json
import pathlib

import aiohttp
import numpy as np
import pytest
from rollout.proxy import Proxy
from rollout.served import FIGURES, Served, play

from intraskill import manifest
from intraskill.rollout import wire
from intraskill.rollout.replica import Unverified
from intraskill.rollout.sglang import SGLangEngine
from intraskill.types import EngineError, InputError, Session

BACKOFF = (0.01, 0.02, 0.04)


@pytest.fixture
async def engine(served: Served):
    client = SGLangEngine([served.address], backoff=BACKOFF)
    yield client
    await client.close()
    assert not client._turns and not client._recoveries
    # no task outlives the client
    others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task() and "SGLangEngine" in repr(t)]
    assert not others


# ------------------------------------------------------------------------------------------------------------------ turns


async def test_turns_are_exact_cached_and_as_probable_as_the_trainer_says(served, engine, tmp_path):
    published = served.publish(tmp_path, 1)
    await engine.load_weights(published)
    differences, cached = [], []
    for seed, length in ((0, 5), (1, 16), (2, 37)):
        sampling = served.sampling()
        tokens, sampled, logprobs, turns = await play(engine, f"s{seed}", (seed,), served.prompt(seed, length), sampling)
        differences += np.abs(np.array(logprobs) - served.trainer_log_probs(published, tokens, sampled, sampling)).tolist()
        for turn in turns:
            assert turn.finish_reason == ("stop" if turn.ids[-1] in sampling.stop_ids else "length")
            assert len(turn.ids) <= 9 and (turn.finish_reason == "stop" or len(turn.ids) == 9)
            assert not set(turn.ids[:-1]) & set(sampling.stop_ids) and not set(turn.ids) & set(sampling.banned_ids)
            assert turn.weight_versions == (1,) and turn.latency > 0
        ends = np.cumsum([length + len(turns[0].ids), 3 + len(turns[1].ids)])  # what each turn leaves behind for the next
        for end, later in zip(ends, turns[1:], strict=True):
            cached.append(later.cached_tokens / end)
            assert 0.9 <= cached[-1] <= 1
    FIGURES["tokens of the previous turns that a turn finds cached, least"] = f"{min(cached):.1%}"
    FIGURES["log-probs on random prompts against the trainer in float32: mean / max"] = f"{np.mean(differences):.4f} / {np.max(differences):.4f}"
    assert np.mean(differences) <= served.mean_error and np.max(differences) <= served.max_error


async def test_one_token_budgets_and_greedy_turns(served, engine, tmp_path):
    published = served.publish(tmp_path, 1)
    await engine.load_weights(published)
    sampling = served.sampling(max_new_tokens=1, temperature=0.0)
    turns = [await engine.generate(served.prompt(3, 12), session=Session(f"g{i}", (i,)), sampling=sampling) for i in range(2)]
    assert turns[0].ids == turns[1].ids and len(turns[0].ids) == 1, "greedy does not depend on the noise"


async def test_what_the_server_refuses_is_an_error_and_not_retried(served, engine, tmp_path):
    await engine.load_weights(served.publish(tmp_path, 1))
    with pytest.raises(EngineError, match="refused /generate: status 400"):
        await engine.generate([5] * 50, session=Session("s", (0,)), sampling=served.sampling(max_new_tokens=10**6))
    assert len((await engine.generate([5, 6], session=Session("t", (0,)), sampling=served.endless(2))).ids) == 2


async def test_unknown_sampling_keys_are_refused(served):
    body = {"rid": "s/1", "input_ids": [5], "sampling_params": {"max_new_tokens": 1, "temprature": 1.0, "sampling_seed": 1}}
    async with aiohttp.ClientSession() as http, http.post(served.address + "/generate", json=body) as response:
        assert response.status == 400


async def test_turns_before_any_weights_are_refused(served, engine):
    with pytest.raises(EngineError, match="call load_weights first"):
        await engine.generate([5], session=Session("s", (0,)), sampling=served.sampling())


async def test_cancelling_aborts_the_turn_on_the_server(served, tmp_path):
    proxy = Proxy(served.address)
    async with proxy.serve() as address:
        engine = SGLangEngine([address], backoff=BACKOFF)
        await engine.load_weights(served.publish(tmp_path, 1))
        sampling = served.endless(60)
        turns = [asyncio.create_task(engine.generate(served.prompt(i, 10), session=Session(f"d{i}", (i,)), sampling=sampling)) for i in range(3)]
        while proxy.counts["/generate"] < 3:
            await asyncio.sleep(0.01)
        for turn in turns:
            turn.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*turns, return_exceptions=True))
        asked = {body["rid"] for path, body in proxy.calls if path == "/generate"}
        assert {body["rid"] for path, body in proxy.calls if path == "/abort_request"} == asked
        # the server computes nothing of them any more: another turn ends
        other = await engine.generate(served.prompt(9, 10), session=Session("other", (9,)), sampling=served.sampling())
        assert other.ids and not engine._turns
        await engine.release(Session("other", (9,)))
        await engine.close()


# ---------------------------------------------------------------------------------------------------------------- weights


async def test_versions_one_ulp_apart_are_told_apart(served, engine, tmp_path):
    one, two = served.publish(tmp_path, 1), served.publish(tmp_path, 2, served.nudged())
    assert one.digest != two.digest
    for published in (one, two, one, two):
        await engine.load_weights(published)
        health = await engine.healthy()
        assert health.ok and (health.weight_version, health.digest) == (published.version, published.digest)
        turn = await engine.generate([5, 6], session=Session(f"s{published}", (0,)), sampling=served.sampling())
        assert turn.weight_versions == (published.version,)


async def test_a_load_that_is_skipped_is_noticed(served, tmp_path):
    """The server answers success, as SGLang does for names that it ignores, and holds what it held."""
    one, two = served.publish(tmp_path, 1), served.publish(tmp_path, 2, served.nudged())
    proxy = Proxy(served.address)
    async with proxy.serve() as address:
        engine = SGLangEngine([address], backoff=BACKOFF)
        await engine.load_weights(one)
        proxy.before = lambda path, count: (200, b'{"success": true, "message": "Success"}') if path == "/update_weights_from_tensor" else None
        with pytest.raises(Unverified, match="holds weights with digest"):
            await engine.load_weights(two)
        assert proxy.counts["/continue_generation"] == 1, "a server that could not be verified stays paused"
        with pytest.raises(EngineError, match="no engine serves"):
            await engine.generate([5], session=Session("s", (0,)), sampling=served.sampling())
        proxy.before = lambda path, count: None
        await engine.load_weights(two)
        assert (await engine.healthy()).digest == two.digest
        await engine.close()


def _edited(published, change):
    """The version with another list of tensors in its manifest, consistent with itself."""
    path = pathlib.Path(published.path)
    content = json.loads((path / manifest.FILE).read_text())
    entries = change(content["tensors"])
    (path / manifest.FILE).write_text(json.dumps(manifest.make(content["version"], content["layout"], entries)))
    return type(published)(published.version, published.path, manifest.digest(entries))


def _truncate(published):
    for file in pathlib.Path(published.path, "arrays").rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return published


def _shorter(entries):
    name = next(n for n in entries if n.endswith("down_proj.weight"))
    return {**entries, name: {**entries[name], "shape": [entries[name]["shape"][0] - 1, entries[name]["shape"][1]]}}


def _no_manifest(published):
    (pathlib.Path(published.path) / manifest.FILE).unlink()
    return published


BROKEN = {
    "wrongly prefixed names": lambda p: _edited(p, lambda e: {f"base.{n}": v for n, v in e.items()}),
    "a missing layer": lambda p: _edited(p, lambda e: {n: v for n, v in e.items() if ".layers.1." not in n}),
    "a shape one short": lambda p: _edited(p, _shorter),
    "another dtype": lambda p: _edited(p, lambda e: {n: {**v, "dtype": "float16"} for n, v in e.items()}),
    "a tensor too many": lambda p: _edited(p, lambda e: {**e, "model.layers.9.mlp.up_proj.weight": next(iter(e.values()))}),
    "a truncated file": _truncate,
    "no commit marker": _no_manifest,
}


async def test_broken_publications_are_refused_before_the_model_is_touched(served, engine, tmp_path):
    good = served.publish(tmp_path, 1)
    await engine.load_weights(good)
    for number, (what, breaks) in enumerate(BROKEN.items(), start=2):
        broken = breaks(served.publish(tmp_path, number, served.nudged()))
        with pytest.raises(EngineError):
            await engine.load_weights(broken)
        assert not (await engine.healthy()).ok, what
        # a client without memory of this one finds the old weights whole
        other = SGLangEngine([served.address], backoff=BACKOFF)
        try:
            await other.load_weights(good)
            assert (await other.healthy()).digest == good.digest, what
            turn = await other.generate([5, 6, 7], session=Session(f"after {number}", (0,)), sampling=served.sampling())
            assert turn.weight_versions == (1,), what
        finally:
            await other.close()


async def test_turns_in_flight_wait_for_an_update_and_go_on_with_the_new_weights(served, engine, tmp_path):
    one, two = served.publish(tmp_path, 1), served.publish(tmp_path, 2, served.nudged("embed"))
    await engine.load_weights(one)
    length = served.max_length - 20
    sampling = served.endless(length)
    first = served.prompt(3, 12)
    running = [asyncio.create_task(engine.generate(first, session=Session(f"s{i}", (i,)), sampling=sampling)) for i in range(2)]
    while len(engine._turns) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)
    await engine.load_weights(two)
    for turn in await asyncio.gather(*running):
        # An update may come before a turn's first token or after its last.
        assert set(turn.weight_versions) <= {1, 2} and len(turn.ids) == length and np.isfinite(turn.logprobs).all()
    assert (await engine.healthy()).digest == two.digest


async def test_nothing_computed_with_old_weights_is_used_again(served, engine, tmp_path):
    params = {**served.params, "embed": served.params["embed"] * 0.5}
    one, two = served.publish(tmp_path, 1), served.publish(tmp_path, 2, params)
    await engine.load_weights(one)
    sampling = served.sampling()
    tokens, sampled, _, _ = await play(engine, "s", (1,), served.prompt(3, 18), sampling, results=((7, 8, 9),))
    await engine.load_weights(two)
    turn = await engine.generate(tokens, session=Session("s", (1,)), sampling=sampling)
    assert turn.cached_tokens == 0 and turn.weight_versions == (2,)
    mask = [False] * len(tokens) + [True] * len(turn.ids)
    expected = served.trainer_log_probs(two, [*tokens, *turn.ids], mask, sampling)
    assert np.abs(np.array(turn.logprobs) - expected).max() <= served.max_error


async def test_safetensors_is_the_other_way_and_as_closely_verified(served, tmp_path):
    proxy = Proxy(served.address)
    async with proxy.serve() as address:
        engine = SGLangEngine([address], layout=manifest.SAFETENSORS, backoff=BACKOFF)
        one, two = served.publish(tmp_path, 1, layout="safetensors"), served.publish(tmp_path, 2, served.nudged(), layout="safetensors")
        await engine.load_weights(one)
        assert (await engine.healthy()).digest == one.digest
        proxy.before = lambda path, count: (200, b'{"success": true, "message": ""}') if path == "/update_weights_from_disk" else None
        with pytest.raises(Unverified, match="holds weights with digest"):
            await engine.load_weights(two)
        proxy.before = lambda path, count: None
        await engine.load_weights(two)
        assert (await engine.healthy()).digest == two.digest
        # success of this route renames the served model; turns do not name it
        assert (await engine.generate([5, 6], session=Session("s", (0,)), sampling=served.sampling())).weight_versions == (2,)
        await engine.close()


async def test_an_update_pauses_first_and_continues_last(served, tmp_path):
    proxy = Proxy(served.address)
    async with proxy.serve() as address:
        engine = SGLangEngine([address], backoff=BACKOFF)
        await engine.load_weights(served.publish(tmp_path, 1))
        await engine.close()
    steps = [p for p in proxy.paths() if p != "/server_info"]
    assert steps == [
        "/pause_generation",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/get_weights_by_name",
        "/update_weight_version",
        "/continue_generation",
    ]
    assert dict(proxy.calls)["/pause_generation"] == {"mode": "retract"}


async def test_a_session_that_a_killed_client_left_open_is_closed(served, engine, tmp_path):
    async with aiohttp.ClientSession() as http:
        for path, body in (("/pause_generation", {"mode": "retract"}), ("/begin_weight_update", {})):
            async with http.post(served.address + path, json=body) as response:
                assert response.status == 200
        async with http.post(served.address + "/begin_weight_update", json={}) as response:
            assert response.status == 400
    published = served.publish(tmp_path, 1)
    await engine.load_weights(published)
    assert (await engine.healthy()).digest == published.digest


async def test_updates_outside_a_session_are_refused(served, tmp_path):
    published = served.publish(tmp_path, 1)
    body = {"serialized_named_tensors": [wire.write_payload(wire.LOAD, published.path)], "load_format": wire.LOADER}
    async with aiohttp.ClientSession() as http, http.post(served.address + "/update_weights_from_tensor", json=body) as response:
        assert response.status == 400 and "begin_weight_update" in (await response.json())["message"]


def test_addresses_that_cannot_be():
    with pytest.raises(InputError, match="each server's address once"):
        SGLangEngine([])
    with pytest.raises(InputError, match="each server's address once"):
        SGLangEngine(["http://a", "http://a"])
    with pytest.raises(InputError, match="must look like"):
        SGLangEngine(["127.0.0.1:30000"])
