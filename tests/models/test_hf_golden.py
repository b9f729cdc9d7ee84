"""Against what transformers computed when tests/golden/make_model.py was run: no torch needed here."""

import functools
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from intraskill.models.qwen35 import cache, hf, model
from intraskill.models.qwen35.config import ModelConfig

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SHAPES = sorted(path.stem for path in (GOLDEN / "model").glob("*.npz"))


@functools.cache
def load(shape):
    """The file's arrays, the config (chunks of 16) and the parameters."""
    golden = dict(np.load(GOLDEN / "model" / f"{shape}.npz"))
    config = ModelConfig.from_hf(json.loads(str(golden["config"])), chunk_size=16)
    params = hf.from_hf_tensors(config, {n.removeprefix("tensor:"): t for n, t in golden.items() if n.startswith("tensor:")})
    return golden, config, params


def test_there_are_the_shapes_that_matter():
    configs = {shape: load(shape)[1] for shape in SHAPES}
    assert {config.value_heads_per_key_head for config in configs.values()} == {1, 2, 3, 4}
    assert {config.tie_embeddings for config in configs.values()} == {True, False}
    assert {sum(map(config.is_full, range(config.num_layers))) for config in configs.values()} == {1, 2}
    lengths = load(SHAPES[0])[0]["lengths"]
    assert min(lengths) < 16 and any(n % 16 for n in lengths if n > 16) and max(lengths) > 32
    for shape in SHAPES:
        assert json.loads(str(load(shape)[0]["versions"])).keys() == {"torch", "transformers", "numpy", "python"}


@functools.partial(jax.jit, static_argnums=1)
def logits_and_gradients(params, config, tokens, positions, segments):
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1)[None], (tokens.shape[0], tokens.shape[1] - 1))
    trained = (segments[:, 1:] > 0).astype(jnp.float32)

    def mean_log_prob(params):
        scored = model.log_probs(params, config, tokens, positions, segments, index, tokens[:, 1:])
        return jnp.sum(scored.logprob * trained) / jnp.sum(trained)

    return model.logits(params, config, model.forward(params, config, tokens, positions, segments)), jax.grad(mean_log_prob)(params)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients(shape):
    golden, config, params = load(shape)
    width = golden["tokens"].shape[1]
    real = np.arange(width)[None] < golden["lengths"][:, None]
    positions, segments = np.where(real, np.arange(width)[None], 0).astype(np.int32), real.astype(np.int32)
    logits, gradients = logits_and_gradients(params, config, golden["tokens"], positions, segments)
    for row, length in enumerate(golden["lengths"]):
        for expected in (golden["logits_right"][row, :length], golden["logits_left"][row, width - length :]):
            np.testing.assert_allclose(logits[row, :length], expected, atol=2e-4, rtol=0)
    ours = dict(hf.to_hf_tensors(config, gradients))
    expected = {name.removeprefix("gradient:"): g for name, g in golden.items() if name.startswith("gradient:")}
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(ours[name], gradient, atol=1e-3 * np.abs(gradient).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("shape", ["four_values_a_key", "three_to_one"])
def test_greedy_decoding(shape):
    golden, config, params = load(shape)

    @jax.jit
    def decode(params, prompts):
        one = jnp.ones(len(prompts), jnp.int32)
        carried = model.extend(params, config, cache.init_cache(config, len(prompts), 80), prompts, prompts.shape[1] * one)

        def step(carried, _):
            hidden, slots = carried
            token = jnp.argmax(model.logits(params, config, hidden), axis=-1).astype(jnp.int32)
            return model.extend(params, config, slots, token[:, None], one), token

        return jax.lax.scan(step, carried, None, length=golden["greedy"].shape[1])[1].T

    np.testing.assert_array_equal(decode(params, golden["prompts"]), golden["greedy"])


@pytest.mark.torch
def test_the_generator_still_makes_what_is_committed():
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("make_model", GOLDEN / "make_model.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert sorted(generator.SHAPES) == SHAPES
    made = generator.make("three_to_one")
    golden = load("three_to_one")[0]
    assert made.keys() == golden.keys()
    for name, array in made.items():
        if name == "config":
            assert str(array) == str(golden[name])
        elif name != "versions":
            np.testing.assert_allclose(array, golden[name], atol=1e-5, err_msg=name)
