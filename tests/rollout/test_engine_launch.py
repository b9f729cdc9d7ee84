"""Whole runs against engine servers, as processes: an engine that dies and comes back, and what is answered with one line."""

import os
import signal

import pytest
from loop.fixtures import checkpoint
from loop.runs import flags
from rollout import engine_process

from intraskill.rollout import records
from intraskill.run_directory import read_json

__all__ = ["checkpoint"]

pytestmark = pytest.mark.timeout(1500)
CONFIG = "configs/pocket.py:smoke"


def test_a_run_whose_engine_is_killed_and_started_again_ends_well(launcher, checkpoint, tmp_path):
    engine, address = engine_process.start(launcher, checkpoint, max_length=640, slots=16)
    settings = {"engine__kind": "sglang", "engine__addresses": f"('{address}',)", "schedule__rounds": 1, "schedule__steps_per_round": 2}
    process = launcher.start("launch/train.py", *flags(CONFIG, tmp_path, "run", checkpoint, **settings))
    groups = tmp_path / "run/rounds/000/groups"
    process.wait_until(lambda: groups.is_dir() and any(groups.glob("*.json")))
    assert process.status is None, process.stderr
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    again, same = engine_process.start(launcher, checkpoint, max_length=640, slots=16, port=int(address.rpartition(":")[2]))
    assert same == address
    assert process.wait() == 0, process.stderr
    assert "Traceback" not in process.stderr
    played = [records.from_json(read_json(p)) for p in sorted(groups.glob("*.json"))]
    assert len(played) >= 8 and all(g.scored for g in played)
    for group in played:  # four groups a step, sampled with the weights of that step whatever process held them
        versions = {v for t in group.trajectories for turn in t.turns for v in turn.completion.weight_versions}
        assert versions == {group.index // 4}
    os.kill(again.pid, signal.SIGTERM)
    assert again.wait() == 0, again.stderr


def refused(process, *words: str) -> None:
    assert process.status == 2, (process.status, process.stderr[-2000:])
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "Traceback" not in process.stderr and not [w for w in words if w not in last], process.stderr


def test_a_run_without_its_engine_ends_with_one_line(launcher, checkpoint, tmp_path):
    settings = {"engine__kind": "sglang", "engine__addresses": "('http://127.0.0.1:9',)", "engine__start_seconds": 0.1}
    refused(launcher.run("launch/train.py", *flags(CONFIG, tmp_path, "run", checkpoint, **settings)), "http://127.0.0.1:9", "start the server")
    settings["engine__addresses"] = "()"
    refused(launcher.run("launch/train.py", *flags(CONFIG, tmp_path, "other", checkpoint, **settings)), "engine.addresses is empty")


def test_what_an_engine_server_cannot_start_with(launcher, checkpoint, tmp_path):
    refused(launcher.run("launch/serve_engine.py", f"--checkpoint={checkpoint}"), "--max_length is missing")
    refused(launcher.run("launch/serve_engine.py", "--max_length=64"), "--checkpoint is missing")
    refused(launcher.run("launch/serve_engine.py", f"--checkpoint={tmp_path / 'nowhere'}", "--max_length=64"), "no such directory")
    refused(launcher.run("launch/serve_engine.py", f"--checkpoint={checkpoint}", "--max_length=4096"), "1024 positions")
