"""Log-probs and entropies against softmax written out in numpy, and the precision that the compiler is asked for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny

from intraskill.models.qwen35 import gated_delta, model

WIDTH = 24


def setup(**overrides):
    config = tiny.config(**overrides)
    params = tiny.params(config)
    tokens = tiny.tokens(config, 2, WIDTH)
    layout = tiny.pack([[10, 14], [20]], WIDTH)
    index = np.asarray([[0, 4, 12], [3, 3, 18]], np.int32)
    targets = np.asarray([[1, 2, 3], [4, 5, 6]], np.int32)
    return config, params, *(jnp.asarray(x) for x in (tokens, *layout, index, targets))


def reference(config, params, tokens, positions, segments, index, targets, temperature, banned):
    hidden = np.asarray(tiny.forward(params, config, tokens, positions, segments), np.float64)
    table = np.asarray(params["embed"], np.float64)
    index, targets = np.asarray(index), np.asarray(targets)
    scores = np.take_along_axis(hidden, index[..., None], axis=1) @ table.T / temperature
    if banned is not None:
        scores[..., np.asarray(banned)] = -np.inf
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    logs = np.log(np.where(probs > 0, probs, 1))
    return np.take_along_axis(np.log(probs), targets[..., None], -1)[..., 0], -(probs * logs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("ban", [False, True])
def test_equal_to_softmax(temperature, ban):
    args = setup()
    banned = None
    if ban:
        banned = jnp.arange(80) >= 70
    with np.errstate(divide="ignore"):
        logprob, entropy = reference(*args, temperature, banned)
    config, params, *batch = args
    ours = jax.jit(lambda p, b: model.log_probs(p, config, *b, temperature=temperature, banned=banned))(params, batch)
    np.testing.assert_allclose(ours.logprob, logprob, atol=2e-5)
    np.testing.assert_allclose(ours.entropy, entropy, atol=2e-5)


def test_large_vocabulary_goes_in_pieces_with_the_same_values_and_gradients(monkeypatch):
    config, params, *batch = setup()
    banned = jnp.arange(80) >= 70

    def loss(params):
        out = model.log_probs(params, config, *batch, banned=banned)
        return jnp.sum(out.logprob) + 0.1 * jnp.sum(out.entropy), out

    def run():
        # A fresh function: jit would otherwise reuse the trace made with the other limit.
        return jax.jit(lambda p: jax.value_and_grad(loss, has_aux=True)(p))(params)

    (_, whole), whole_grads = run()
    monkeypatch.setattr(model, "_LOGITS_AT_ONCE", 80 * 4)  # 4 of the 6 positions at a time: one piece is padded
    (_, pieces), piece_grads = run()
    np.testing.assert_allclose(pieces.logprob, whole.logprob, atol=1e-6)
    np.testing.assert_allclose(pieces.entropy, whole.entropy, atol=1e-6)
    for a, b in zip(jax.tree.leaves(piece_grads), jax.tree.leaves(whole_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


def test_zero_temperature_is_refused():
    config, params, *batch = setup()
    with pytest.raises(ValueError, match="temperature must be > 0"):
        model.log_probs(params, config, *batch, temperature=0.0)


def products(function, *args):
    """The matrix products of the program as it is handed to the compiler for TPU: (operand types, line)."""
    text = jax.export.export(jax.jit(function), platforms=["tpu"])(*args).mlir_module()
    found = []
    for line in text.splitlines():
        if "stablehlo.dot_general" in line:
            left, right = re.search(r": \(tensor<[^>]*?(\w+)>, tensor<[^>]*?(\w+)>\)", line).groups()
            found.append((left.split("x")[-1], right.split("x")[-1], line))
    return found


def assert_full_precision(found, at_least):
    float32 = [line for left, right, line in found if left == right == "f32"]
    assert len(float32) >= at_least
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in float32)


def trained(config):
    def loss(params, batch):
        out = model.log_probs(params, config, *batch)
        return jnp.sum(out.logprob + out.entropy)

    return jax.grad(loss)


def test_float32_products_ask_for_full_precision_on_tpu():
    """There a float32 product runs in bfloat16 passes by default; results on CPU cannot show it, the lowered program can."""
    config, _, *batch = setup()
    assert_full_precision(products(trained(config), model.abstract_params(config), batch), at_least=40)


def test_bfloat16_activations_leave_the_delta_rule_in_float32_on_tpu():
    config, _, *batch = setup(dtype="bfloat16")
    found = products(trained(config), model.abstract_params(config), batch)
    assert_full_precision(found, at_least=15)
    # The two that mix both are the gradients of the logits, by vocabulary and by hidden state: their other factor is bfloat16 anyway.
    assert sum(left != right for left, right, _ in found) == 2
    assert any(left == right == "bf16" for left, right, _ in found)


def test_delta_rule_is_float32_inside_bfloat16():
    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def loss(q, k, v, beta, g):
        return jnp.sum(gated_delta.chunked(q, k, v, beta, g, jnp.zeros((1, 32), jnp.int32), None, 16)[0])

    args = [shaped(1, 32, 2, 8), shaped(1, 32, 2, 8), shaped(1, 32, 2, 2, 8), shaped(1, 32, 2, 2), shaped(1, 32, 2, 2)]
    found = products(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), *args)
    assert_full_precision(found, at_least=15)
    assert all(left == right == "f32" for left, right, _ in found)


def test_no_buffer_of_tokens_by_vocabulary():
    """Temporary memory of the compiled gradient: less than one float32 matrix of all trained tokens by the vocabulary."""
    config = tiny.config(vocab_size=65_536, hidden_size=16, intermediate_size=16)
    rows, width = 2, 1024

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    batch = [ints(rows, width)] * 5
    compiled = jax.jit(trained(config)).lower(model.abstract_params(config), batch).compile().memory_analysis()
    logits_bytes = rows * width * config.vocab_size * 4
    assert compiled.temp_size_in_bytes < 0.75 * logits_bytes
