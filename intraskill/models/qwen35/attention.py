"""Full attention with grouped key-value heads, masked by segment.

Queries are handled in blocks, each against the keys up to its own end only: half the products of a dense causal mask, and scores of one block at
a time. Scores and softmax are float32.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from intraskill.models.qwen35.layers import precision

_MIN_BLOCK = 128
_MAX_BLOCKS = 16  # blocks are unrolled: their number bounds the size of the compiled program
MASKED = -1e30  # finite, so that a row without any key (padding) gives no NaN


def attend(
    q: Float[Array, "B Q H d"], k: Float[Array, "B H_kv S d"], v: Float[Array, "B H_kv S d"], mask: Bool[Array, "B Q S"]
) -> Float[Array, "B Q H d"]:
    """Softmax attention of given queries over given keys."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bqhgd,bhsd->bhgqs", grouped, k, precision=precision(q.dtype), preferred_element_type=jnp.float32) * width**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("bhgqs,bhsd->bqhgd", weights, v, precision=precision(v.dtype)).reshape(q.shape)


def attend_packed(
    q: Float[Array, "B T H d"], k: Float[Array, "B T H_kv d"], v: Float[Array, "B T H_kv d"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T H d"]:
    """Causal attention inside each segment of each row."""
    length = q.shape[1]
    block = max(_MIN_BLOCK, -(-length // _MAX_BLOCKS))
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    outs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        same = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
        causal = (jnp.arange(start, end)[:, None] >= jnp.arange(end)[None])[None]
        outs.append(attend(q[:, start:end], k[:, :, :end], v[:, :, :end], same & causal))
    return jnp.concatenate(outs, axis=1)


def _attend_one(
    q: Float[Array, "B H d"], k: Float[Array, "B H_kv S d"], v: Float[Array, "B H_kv S d"], mask: Bool[Array, "B S"]
) -> Float[Array, "B H d"]:
    """One query per slot. With the keys as left operand the product is a plain pass over them, 2-3 times faster on CPU."""
    batch, heads, width = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bhsd,bhgd->bhsg", k, grouped, precision=precision(q.dtype), preferred_element_type=jnp.float32)
    # Without the barrier XLA folds the transposition into the product and swaps the operands back.
    scores = jnp.swapaxes(lax.optimization_barrier(scores), 2, 3) * width**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("bhgs,bhsd->bhgd", weights, v, precision=precision(v.dtype)).reshape(q.shape)


def attend_cached(
    q: Float[Array, "B T H d"], k: Float[Array, "B H_kv S d"], v: Float[Array, "B H_kv S d"], start: Int[Array, " B"]
) -> Float[Array, "B T H d"]:
    """Causal attention of T new tokens, the first at position `start`, over a cache that holds them already."""
    length = q.shape[1]
    if length == 1:
        return _attend_one(q[:, 0], k, v, jnp.arange(k.shape[2])[None] <= start[:, None])[:, None]
    outs = []
    for begin in range(0, length, _MIN_BLOCK):
        end = min(begin + _MIN_BLOCK, length)
        position = start[:, None] + jnp.arange(begin, end)[None]
        outs.append(attend(q[:, begin:end], k, v, jnp.arange(k.shape[2])[None, None] <= position[..., None]))
    return jnp.concatenate(outs, axis=1)
