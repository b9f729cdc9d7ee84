"""Tiled attention against the softmax written out over the whole row, and the memory that its compiled gradient needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny

from intraskill.models.qwen35 import attention

HEADS, KV_HEADS, WIDTH = 4, 2, 16


def inputs(batch, length, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(batch, length, heads, WIDTH)), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def written_out(q, k, v, segments):
    """Softmax over all earlier tokens of the same segment; padding (segment 0) attends to padding."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / WIDTH**0.5
    index = jnp.arange(q.shape[1])
    mask = (segments[:, :, None] == segments[:, None]) & (index[:, None] >= index[None])[None]
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")


# One tile; three tiles of which some are skipped in all rows, some in one only; a last tile that is not full.
@pytest.mark.parametrize(("length", "parts"), [(70, [[70], [30, 25]]), (384, [[128, 100, 28, 128], [300, 84]]), (300, [[129, 127], [40, 260]])])
def test_tiles_equal_the_whole_softmax_with_gradients(length, parts):
    q, k, v, weight = inputs(2, length)
    segments = jnp.asarray(tiny.pack(parts, length)[1])
    weight = jnp.where((segments > 0)[..., None, None], weight, 0)

    def both(attend):
        def loss(q, k, v):
            out = attend(q, k, v, segments)
            return jnp.sum(weight * out), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return out, grads

    (ours, our_grads), (expected, expected_grads) = both(attention.attend_packed), both(written_out)
    real = np.asarray(segments > 0)
    np.testing.assert_allclose(np.asarray(ours)[real], np.asarray(expected)[real], atol=5e-6)
    for a, b in zip(our_grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert np.isfinite(a).all()


def test_memory_grows_with_the_length_and_not_its_square():
    def temporary_bytes(length):
        q, k, v = (jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        gradient = jax.grad(lambda q, k, v, s: jnp.sum(attention.attend_packed(q, k, v, s)), argnums=(0, 1, 2))
        return jax.jit(gradient).lower(q, k, v, segments).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(512), temporary_bytes(2048)
    assert long < 4.5 * short
    assert long < HEADS * 2048 * 2048 * 4 / 2  # half of one matrix of scores
