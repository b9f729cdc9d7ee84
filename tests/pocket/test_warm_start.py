"""The warm start's unfinished directory: what it belongs to, and that only one process works in it."""

import os
import re

import pytest

from intraskill.run_directory import take_lock
from intraskill.telemetry import Progress
from intraskill.types import InputError
from pocket import warm_start
from pocket.warm_start import WarmStartConfig


def small(**changes) -> WarmStartConfig:
    return WarmStartConfig(**{"worlds": 1, "warmup_steps": 0, "tokens": 3456, **changes})


@pytest.mark.loose_numerics
def test_another_recipe_over_an_unfinished_directory(chat, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "SAVE_EVERY", 1)
    shape = warm_start.model_config(chat.vocab_size)
    with Progress() as progress:
        warm_start.train(small(), chat, shape, tmp_path, progress)
        with pytest.raises(InputError, match=re.escape("seed is 0 there and 1 here")) as error:
            warm_start.train(small(seed=1), chat, shape, tmp_path, progress)
    assert "tokens" not in str(error.value) and "demonstrations" not in str(error.value), "what agrees is not listed"


def test_a_second_process_is_refused(tmp_path):
    work = tmp_path / "x.unfinished"
    work.mkdir()
    lock = take_lock(work)
    try:
        with pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
            warm_start.make_checkpoint(small(), tmp_path / "x")
    finally:
        os.close(lock)
    assert [f.name for f in work.iterdir()] == ["lock"]


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "DISK", 10**18)
    with pytest.raises(InputError, match="of disk"):
        warm_start.make_checkpoint(small(), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_cannot_be_written(tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match="tokenizer cannot be written"):
        warm_start.make_chat(tmp_path)
