"""What only a real SGLang can show: a killed server, what its success codes hide, and a round of the whole loop."""

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from rollout.served import FIGURES
from sglang_cpu import serve
from sglang_cpu.process import CHECKPOINT, MAX_ERROR, MEAN_ERROR, shared

from configs import pocket
from intraskill import step_metrics
from intraskill.rollout import records, wire
from intraskill.rollout.agent import Limits
from intraskill.rollout.collect import Assignment, Rollout, collect_groups
from intraskill.rollout.sglang import SGLangEngine
from intraskill.run_directory import read_json
from intraskill.types import Mask, Sampling, Session, Status
from launch import shop as shops
from launch.shop import ClientShop
from pocket.warm_start import make_chat
from shop_env.client import ShopClient

pytestmark = pytest.mark.timeout(3600)


async def test_update_takes(served, tmp_path):
    engine = SGLangEngine([served.address])
    published = served.publish(tmp_path, 1)
    await engine.load_weights(published)
    start = time.monotonic()
    await engine.load_weights(served.publish(tmp_path, 2, served.nudged()))
    FIGURES["publish, pause, load, verify, continue: seconds (pocket model)"] = f"{time.monotonic() - start:.1f}"
    await engine.close()


async def test_what_a_success_code_hides_is_what_the_digest_shows(served, tmp_path):
    """Straight to the server, without our client: the update is refused by the loader, SGLang answers success and renames the version."""
    engine = SGLangEngine([served.address])
    good = served.publish(tmp_path, 1)
    await engine.load_weights(good)
    missing = tmp_path / "nowhere"
    async with aiohttp.ClientSession() as http:

        async def post(path, body):
            async with http.post(served.address + path, json=body) as response:
                return response.status, await response.text()

        await post("/pause_generation", {"mode": "retract"})
        await post("/begin_weight_update", {})
        payload = [wire.write_payload(wire.LOAD, str(missing))]
        update = {"serialized_named_tensors": payload, "load_format": wire.LOADER, "flush_cache": True, "weight_version": "9"}
        status, _ = await post("/update_weights_from_tensor", update)
        assert status == 200, "nothing was loaded, and SGLang calls it a success"
        async with http.get(served.address + "/model_info") as response:
            assert (await response.json())["weight_version"] == "9"
        await post("/end_weight_update", {})
        await post("/continue_generation", {})
    health = await engine.healthy()
    assert not health.ok and "never completely published" in health.detail
    await engine.load_weights(good)
    assert (await engine.healthy()).digest == good.digest
    await engine.close()


async def test_a_server_killed_while_it_generates_gets_the_weights_before_it_goes_on(served, tmp_path):
    published = served.publish(tmp_path, 1, served.nudged())  # not what it starts with
    engine = SGLangEngine([served.address])
    await engine.load_weights(published)
    turn = asyncio.create_task(engine.generate(served.prompt(1, 20), session=Session("s", (1,)), sampling=served.endless(300)))
    while not engine._turns:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    process = shared(os.environ["INTRASKILL_SGLANG"])
    await asyncio.to_thread(process.kill)
    start = time.monotonic()
    await asyncio.to_thread(process.start)
    completion = await turn
    FIGURES["killed while generating: seconds from its restart to the turn's end"] = f"{time.monotonic() - start:.0f}"
    assert completion.weight_versions == (1,) and len(completion.ids) == 300
    assert (await engine.healthy()).digest == published.digest
    await engine.close()


def test_one_round_of_the_whole_loop(served, tmp_path):
    """Rollout, update, sync, analysis, gate, next bank, with the pocket policy; two steps, so that updated weights were sampled from."""
    settings = {"engine.kind": "sglang", "engine.addresses": f"('{served.address}',)", "schedule.rounds": 1, "schedule.steps_per_round": 2}
    settings |= {"runs_directory": tmp_path, "name": "round"}
    arguments = [f"--config.{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "launch/train.py", "--config=configs/pocket.py:smoke", *arguments]
    done = subprocess.run(command, cwd=serve.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    run = tmp_path / "round"
    groups = [records.from_json(read_json(p)) for p in sorted(run.glob("rounds/*/groups/*.json"))]
    episodes = [e for g in groups for e in g.trajectories]
    assert len(episodes) >= 2 * 16 and all(e.scored for e in episodes)
    assert any(e.status == Status.PURCHASE for e in episodes)
    assert {v for g in groups for e in g.trajectories for t in e.turns for v in t.completion.weight_versions} == {0, 1}
    _assert_token_exact(episodes)
    ratio = step_metrics.prefilled_per_new_token(episodes)
    turns = sum(len(e.turns) for e in episodes)
    FIGURES["one round of the loop: episodes, turns, prefilled / new tokens"] = f"{len(episodes)}, {turns}, {ratio:.3f}"
    lines = (run / "metrics.jsonl").read_text()
    assert lines.count('"kind": "sync"') == 2 and (run / "summary.json").is_file()


def _assert_token_exact(episodes) -> None:
    """Every prompt is the previous prompt, the exact ids that were sampled, and the rendered result."""
    chat = make_chat(CHECKPOINT)
    for episode in episodes:
        for turn, following in zip(episode.turns, episode.turns[1:], strict=False):
            end = turn.prompt_length + len(turn.completion.ids)
            assert episode.tokens[turn.prompt_length : end] == turn.completion.ids
            assert list(episode.tokens[end : following.prompt_length]) == chat.tool_result(turn.observation)


async def test_log_probs_of_real_episodes_are_the_trainers(served, tmp_path):
    """What importance ratios are made of: episodes of the pocket policy in its shop, against the trainer's function and the same weights."""
    engine, chat = SGLangEngine([served.address]), make_chat(CHECKPOINT)
    published = served.publish(tmp_path, 1)
    await engine.load_weights(published)
    sampling = Sampling(40, temperature=1.0, stop_ids=chat.stop_ids, banned_ids=served.banned)
    with shops.serve(pocket.get_config("smoke")) as shop:
        async with ShopClient(shop.url, shop.key) as client:
            tasks = await ClientShop(client).tasks("train")
            rollout = Rollout(engine, ClientShop(client), chat, sampling, Limits(1152, 24), (0, 0), 2, concurrency=8)
            groups = await collect_groups(rollout, [Assignment(i, tasks[i], Mask.skill_free(), ()) for i in range(6)], lambda g: None)
    await engine.close()
    episodes = [t for g in groups for t in g.trajectories]
    differences = {}
    for dtype in ("bfloat16", "float32"):
        trainer = dataclasses.replace(served, config=dataclasses.replace(served.config, dtype=dtype), max_length=1152)
        expected = [trainer.trainer_log_probs(published, list(e.tokens), list(e.loss_mask), sampling) for e in episodes]
        sampled = [np.array(e.logprobs)[list(e.loss_mask)] for e in episodes]
        found = differences[dtype] = np.abs(np.concatenate(sampled) - np.concatenate(expected))
        name = f"log-probs of real episodes against the trainer in {dtype}: tokens, mean / max of the difference"
        FIGURES[name] = f"{len(found)}, {np.mean(found):.4f} / {np.max(found):.4f}"
    for dtype, found in differences.items():
        assert np.mean(found) <= MEAN_ERROR and np.max(found) <= MAX_ERROR, (dtype, FIGURES)


def test_the_environment_is_the_servers_own():
    """What the loader imports is there, and JAX is not."""
    program = "import intraskill.rollout.sglang_loader, sys; assert 'jax' not in sys.modules and 'orbax' not in sys.modules; print(sys.prefix)"
    python = Path(serve.variables()["INTRASKILL_SGLANG"]) / "bin/python"
    found = subprocess.run([python, "-c", program], env=serve.variables(), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
