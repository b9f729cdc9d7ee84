"""Full attention with grouped key-value heads, masked by segment.

Packed rows are handled in square tiles of queries by keys with a running softmax, and the backward pass computes the tiles again from the saved
log-sum: memory grows with the length of a row, not with its square. Tiles above the diagonal are never visited, and those whose queries and keys
share no segment in any row are skipped while running. Scores, softmax and sums are float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from intraskill.models.qwen35.layers import precision

_MIN_BLOCK = 128
_MAX_BLOCK = 1024
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


class _Tiles(NamedTuple):
    """Where the tiles of a row lie: block of queries, block of keys, and whether any row needs the tile."""

    queries: Int[Array, " P"]
    keys: Int[Array, " P"]
    needed: Bool[Array, " P"]


def _tiles(segments: Int[Array, "B n C"]) -> _Tiles:
    """Tiles on and below the diagonal, each diagonal one before its row's others, so that every query has met a key when the others come."""
    pairs = np.asarray([(i, j) for i in range(segments.shape[1]) for j in range(i, -1, -1)], np.int32)
    queries, keys = pairs[:, 0], pairs[:, 1]
    first, last = segments[:, :, 0][:, queries], segments[:, :, -1][:, keys]  # [B, P]
    # Segments are contiguous: an earlier block shares one with a later block only if it ends with what the later one begins with.
    needed = jnp.any((first == last) & (first > 0), axis=0) | (queries == keys)
    return _Tiles(jnp.asarray(queries), jnp.asarray(keys), needed)


def _at(x: Float[Array, "..."], block: Int[Array, ""]) -> Float[Array, "..."]:
    return lax.dynamic_index_in_dim(x, block, 2, keepdims=False)


def _put(x: Float[Array, "..."], part: Float[Array, "..."], block: Int[Array, ""]) -> Float[Array, "..."]:
    return lax.dynamic_update_index_in_dim(x, part, block, 2)


def _tile_scores(q: Float[Array, "B H_kv CG d"], k: Float[Array, "B H_kv C d"], segments: Int[Array, "B n C"], i: Any, j: Any) -> Array:
    """Masked scores [B, H_kv, C * G, C] of a tile: its queries are block i, its keys block j."""
    length = segments.shape[2]
    scores = jnp.einsum("bhqd,bhsd->bhqs", q, k, precision=precision(q.dtype), preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    here, there = (lax.dynamic_index_in_dim(segments, block, 1, keepdims=False) for block in (i, j))
    column = jnp.arange(length)
    allowed = (here[:, :, None] == there[:, None]) & ((column[:, None] >= column[None]) | (i > j))[None]
    grouped = scores.reshape(*scores.shape[:2], length, -1, length)
    return jnp.where(allowed[:, None, :, None], grouped, MASKED).reshape(scores.shape)


def _forward_tile(q, k, v, segments, i, j, total, top, out):
    scores = _tile_scores(q, k, segments, i, j)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights, kept = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
    read = jnp.einsum("bhqs,bhsd->bhqd", weights.astype(v.dtype), v, precision=precision(v.dtype), preferred_element_type=jnp.float32)
    return kept * total + jnp.sum(weights, axis=-1), new_top, kept[..., None] * out + read


def _backward_tile(q, k, v, d_out, log_total, dot, segments, i, j, dq, dk, dv):
    product = functools.partial(jnp.einsum, precision=precision(q.dtype), preferred_element_type=jnp.float32)
    weights = jnp.exp(_tile_scores(q, k, segments, i, j) - log_total[..., None])
    dv += product("bhqs,bhqd->bhsd", weights.astype(q.dtype), d_out)
    d_scores = (weights * (product("bhqd,bhsd->bhqs", d_out, v) - dot[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
    return dq + product("bhqs,bhsd->bhqd", d_scores, k), dk + product("bhqs,bhqd->bhsd", d_scores, q), dv


@jax.custom_vjp
def _tiled(q, k, v, segments):
    """Attention of q [B, H_kv, n, C * G, d] over k, v [B, H_kv, n, C, d] with segments [B, n, C]; the result is like q."""
    return _tiled_fwd(q, k, v, segments)[0]


def _tiled_fwd(q, k, v, segments):
    def visit(carried, tile):
        def work(total, top, out):
            return _forward_tile(_at(q, tile.queries), _at(k, tile.keys), _at(v, tile.keys), segments, tile.queries, tile.keys, total, top, out)

        parts = lax.cond(tile.needed, work, lambda *parts: parts, *(_at(x, tile.queries) for x in carried))
        return tuple(_put(x, part, tile.queries) for x, part in zip(carried, parts, strict=True)), None

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    (total, top, out), _ = lax.scan(visit, (zeros, zeros + MASKED, jnp.zeros(q.shape, jnp.float32)), _tiles(segments))
    out = (out / total[..., None]).astype(q.dtype)
    return out, (q, k, v, segments, out, top + jnp.log(total))


def _tiled_bwd(kept, d_out):
    q, k, v, segments, out, log_total = kept
    dot = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def visit(carried, tile):
        i, j = tile.queries, tile.keys

        def work(dq, dk, dv):
            return _backward_tile(_at(q, i), _at(k, j), _at(v, j), _at(d_out, i), _at(log_total, i), _at(dot, i), segments, i, j, dq, dk, dv)

        parts = lax.cond(tile.needed, work, lambda *parts: parts, *(_at(x, block) for x, block in zip(carried, (i, j, j), strict=True)))
        return tuple(_put(x, part, block) for x, part, block in zip(carried, parts, (i, j, j), strict=True)), None

    carried, _ = lax.scan(visit, tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)), _tiles(segments))
    return *(x.astype(q.dtype) for x in carried), None


_tiled.defvjp(_tiled_fwd, _tiled_bwd)


def attend_packed(
    q: Float[Array, "B T H d"], k: Float[Array, "B T H_kv d"], v: Float[Array, "B T H_kv d"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T H d"]:
    """Causal attention inside each segment of each row."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    block = min(_MAX_BLOCK, max(_MIN_BLOCK, length // 16 // _MIN_BLOCK * _MIN_BLOCK))
    blocks = -(-length // block)

    def cut(x: Float[Array, "B T H_kv G d"]) -> Float[Array, "B H_kv n CG d"]:
        x = jnp.pad(x, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0), (0, 0)))
        return jnp.moveaxis(x, 2, 1).reshape(batch, kv_heads, blocks, -1, width)

    segments = jnp.pad(segment_ids, ((0, 0), (0, blocks * block - length))).reshape(batch, blocks, block)
    out = _tiled(cut(q.reshape(batch, length, kv_heads, -1, width)), cut(k[:, :, :, None]), cut(v[:, :, :, None]), segments)
    out = out.reshape(batch, kv_heads, blocks * block, heads // kv_heads, width)[:, :, :length]
    return jnp.moveaxis(out, 1, 2).reshape(q.shape)


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
