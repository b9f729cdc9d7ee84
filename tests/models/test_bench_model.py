"""The benchmark of forward pass and training step: its comparison with Hugging Face holds on small rows however they are cut, and can fail."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from benchmarks import bench_model  # noqa: E402
from benchmarks.peers import hf_qwen35  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.loose_numerics]  # the script runs without strict promotion

SMALL = dataclasses.replace(hf_qwen35.SHAPE, vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=4)


def test_every_cut_agrees_and_every_figure_has_a_target(capsys):
    ratios = bench_model.compare(SMALL, rows=4, length=40, rounds=1)
    assert ratios.keys() == bench_model.TARGETS.keys() and min(ratios.values()) > 0
    sides = [line.split()[0:3] for line in capsys.readouterr().out.splitlines()]
    assert all([work, side, cut] in sides for work in ("forward", "step") for side in ("ours", "HF") for cut in "124")


def test_a_wrong_scale_of_the_parts_is_found(monkeypatch):
    """Gradients that are added up but not averaged."""
    whole = hf_qwen35.loss_and_gradients

    def summed(model, tokens, at_once):
        loss, gradients = whole(model, tokens, at_once)
        return loss, {name: gradient * (len(tokens) / at_once) for name, gradient in gradients.items()}

    monkeypatch.setattr(bench_model.hf_qwen35, "loss_and_gradients", summed)
    with pytest.raises(AssertionError):
        bench_model.compare(SMALL, rows=2, length=40, rounds=1)
