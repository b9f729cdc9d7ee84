"""The benchmark of a full update: its comparison with torch holds on small rows, and its two ratios come out."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from benchmarks import bench_train  # noqa: E402
from benchmarks.peers import hf_qwen35  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.loose_numerics]  # the script runs without strict promotion

SMALL = dataclasses.replace(hf_qwen35.SHAPE, vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=4)


def test_updates_agree_with_torch(capsys):
    assert bench_train.against_torch(SMALL, rows=2, length=96, sizes=(1, 2), rounds=1) > 0
    assert capsys.readouterr().out.count("gradient norm") == 4


def test_an_update_that_differs_is_found(monkeypatch):
    """With another clip range on one side the second update differs."""
    narrow = dataclasses.replace(bench_train.OBJECTIVE, clip_low=1e-6, clip_high=1e-6)
    loop = bench_train.hf_train.Loop
    monkeypatch.setattr(bench_train.hf_train, "Loop", lambda model, optimizer, _: loop(model, optimizer, narrow))
    with pytest.raises(AssertionError):
        bench_train.against_torch(SMALL, rows=2, length=96, sizes=(1,), rounds=1)


def test_rows_of_two_lengths():
    assert bench_train.growth(SMALL, short=64, long=128, rounds=1) > 0
