"""Kills, full disks and memory, each in a process of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from models import checkpoints, tiny

from intraskill.models.qwen35 import hf, hf_directory
from intraskill.types import InputError

HERE = Path(__file__).resolve().parent
MEGABYTE = 1 << 20


def run(script, directory):
    path = os.pathsep.join((str(HERE.parents[1]), str(HERE.parent)))
    # Memory is to be what is in use, not what the allocator keeps for later: every larger block is mapped and unmapped on its own.
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(HERE / script), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return run("hf_faults.py", tmp_path_factory.mktemp("faults"))


def test_a_kill_leaves_nothing_that_looks_complete_and_does_not_hinder_the_next_attempt(faults):
    assert len(faults["kills"]) == 12
    for kill in faults["kills"]:
        assert kill["signal"] == signal.SIGKILL, kill
        assert kill["left"] == ["out.partial"], kill
        assert (kill["again"], kill["error"], kill["left again"]) == (0, "None", ["out"]), kill


def test_a_full_disk_leaves_nothing_and_says_so_in_one_line(faults):
    assert [disk["task"] for disk in faults["disks"]] == ["import", "export", "save"]
    for disk in faults["disks"]:
        assert disk["status"] == 3 and disk["left"] == [], disk
        assert "File too large; nothing was left there, free some space" in disk["said"] and "\n" not in disk["said"], disk


def test_a_disk_that_is_too_small_is_noticed_before_the_work(tmp_path, monkeypatch):
    config = tiny.config()
    checkpoints.multimodal(tmp_path / "published", config)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=9))
    for write in (
        lambda out: hf.import_hf(tmp_path / "published", out),
        lambda out: hf.save_hf(out, config, checkpoints.params(config)),
    ):
        with pytest.raises(InputError, match="of disk and 0.0 MB are free"):
            write(tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"published"}


def test_two_writers_of_one_directory_do_not_meet(tmp_path):
    config = tiny.config()
    with hf_directory.created(tmp_path / "out", 0) as stage:
        (stage / "file").write_text("first")
        with pytest.raises(InputError, match="another process is writing it"):
            hf.save_hf(tmp_path / "out", config, checkpoints.params(config))
    assert (tmp_path / "out" / "file").read_text() == "first" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_memory_beyond_the_parameters_is_bounded_by_the_largest_array(tmp_path):
    found = run("hf_memory.py", tmp_path)
    parameters, largest = found["parameters"], found["largest"]
    assert 6 * largest < parameters
    for task, peak in found["peaks"].items():
        width = 4 if task.endswith("float32") else 2
        # A few megabytes for blocks, buffers and threads.
        allowed = 1.5 * largest * width + 4 * MEGABYTE
        if task.startswith("load"):
            allowed += parameters * width
        elif not task.startswith("save"):
            allowed += largest * width  # the array being written, and the next one being read: no parameters are held
        assert peak <= allowed, (task, peak / MEGABYTE, allowed / MEGABYTE, found)
