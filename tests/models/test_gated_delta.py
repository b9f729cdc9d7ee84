"""The chunked rule against the recurrence written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from intraskill.models.qwen35 import gated_delta

BATCH, LENGTH, HEADS, GROUP, KEY, VALUE = 2, 45, 2, 2, 8, 6


def inputs(seed=0, length=LENGTH):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(BATCH, length, HEADS, KEY)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(BATCH, length, HEADS, GROUP, VALUE))
    beta = rng.uniform(size=(BATCH, length, HEADS, GROUP))
    g = -np.exp(rng.normal(size=beta.shape) * 2 - 1)
    return q, k, v, beta, g


def recurrence(q, k, v, beta, g, segments=None, state=None):
    """S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q, starting from zero at each new segment."""
    out = np.zeros(v.shape)
    state = np.zeros((BATCH, HEADS, KEY, GROUP, VALUE)) if state is None else state.copy()
    for b in range(BATCH):
        for t in range(q.shape[1]):
            if segments is not None and t and segments[b, t] != segments[b, t - 1]:
                state[b] = 0
            for h in range(HEADS):
                for i in range(GROUP):
                    s = state[b, h, :, i] * np.exp(g[b, t, h, i])
                    s = s + np.outer(k[b, t, h], beta[b, t, h, i] * (v[b, t, h, i] - s.T @ k[b, t, h]))
                    out[b, t, h, i] = s.T @ q[b, t, h]
                    state[b, h, :, i] = s
    return out, state


def to_jax(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


@pytest.mark.parametrize("chunk", [8, 16, 32])
def test_chunks_equal_the_recurrence_with_resets_anywhere(chunk):
    segments = np.zeros((BATCH, LENGTH), np.int32)
    segments[0, 3:], segments[0, 16:], segments[0, 17:] = 1, 2, 3  # inside a chunk, at its start, after one token
    segments[1, 31:], segments[1, 32:], segments[1, 40:] = 1, 2, 3  # last token of a chunk alone
    args = inputs()
    expected, last = recurrence(*args, segments)
    out, state = jax.jit(gated_delta.chunked, static_argnums=7)(*to_jax(*args), jnp.asarray(segments), None, chunk)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


def test_state_continues_where_it_stopped():
    args = inputs(1)
    expected, last = recurrence(*args)
    zeros = jnp.zeros((BATCH, LENGTH), jnp.int32)
    first, state = gated_delta.chunked(*to_jax(*(a[:, :20] for a in args)), zeros[:, :20], None, 16)
    second, state = gated_delta.chunked(*to_jax(*(a[:, 20:] for a in args)), zeros[:, 20:], state, 16)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), expected, atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


def test_single_steps_equal_the_recurrence():
    args = inputs(2, length=12)
    start = np.random.default_rng(3).normal(size=(BATCH, HEADS, KEY, GROUP, VALUE))
    expected, last = recurrence(*args, state=start)
    (state,) = to_jax(start)
    for t in range(12):
        out, state = gated_delta.step(*to_jax(*(a[:, t] for a in args)), state)
        np.testing.assert_allclose(out, expected[:, t], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_inverse_of_equal_keys_is_exact(size):
    """Equal keys with beta 1 and no decay: I + A is all ones below the diagonal, its inverse has 1 and -1 on two diagonals.

    Powers of A reach 1e8 for 32 keys here; an inverse that sums them has no correct digit left.
    """
    strict = jnp.tril(jnp.ones((1, size, size)), -1)
    np.testing.assert_allclose(gated_delta.invert_unit_lower(strict)[0], np.eye(size) - np.eye(size, k=-1), atol=1e-5)


def test_inverse_and_its_gradient_equal_linalg():
    rng = np.random.default_rng(0)
    strict = jnp.asarray(np.tril(rng.normal(size=(3, 16, 16)) * 0.3, -1), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(3, 16, 16)), jnp.float32)

    def reference(a):
        return jnp.linalg.inv(jnp.eye(16)[None] + a)

    np.testing.assert_allclose(gated_delta.invert_unit_lower(strict), reference(strict), atol=1e-5)
    ours, expected = (jax.grad(lambda a, f=f: jnp.sum(weight * f(a)))(strict) for f in (gated_delta.invert_unit_lower, reference))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_inputs_lose_no_more_than_their_own_rounding():
    """Inputs in bfloat16, everything inside in float32: the error against float64 on the same inputs is that of rounding the output."""
    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in inputs(4)[:3]] + list(inputs(4)[3:])
    expected, _ = recurrence(*rounded)
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in rounded[:3])
    beta, g = to_jax(*rounded[3:])
    out, _ = gated_delta.chunked(q, k, v, beta, g, jnp.zeros((BATCH, LENGTH), jnp.int32), None, 16)
    error = np.asarray(out.astype(jnp.bfloat16), np.float64) - expected
    assert np.linalg.norm(error) / np.linalg.norm(expected) <= 2e-3


def test_convolution_by_hand():
    """Weights 1, 10, 100 on a single channel: digits show which earlier tokens took part."""
    x = jnp.asarray([1, 2, 3, 4, 5], jnp.float32).reshape(1, 5, 1, 1)
    weight = jnp.asarray([1, 10, 100], jnp.float32).reshape(3, 1, 1)
    out = gated_delta.causal_conv(x, weight, jnp.asarray([[1, 1, 1, 2, 2]]))
    assert out[0, :, 0, 0].tolist() == [100, 210, 321, 400, 540]
    window = jnp.concatenate([jnp.asarray([8, 9], jnp.float32).reshape(1, 2, 1, 1), x], axis=1)
    assert gated_delta.conv_window(window, weight)[0, :, 0, 0].tolist() == [198, 219, 321, 432, 543]
