"""Causal attention inside segments by the TPU kernel that JAX ships (splash attention).

Scores live in the chip's own memory, one tile at a time, forward and backward: a row of 24,576 tokens would otherwise write 39 GB of them a layer.
Tiles above the diagonal are skipped; segments only mask, they save no work.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from intraskill.types import InputError

_TILES = (1024, 512, 256, 128)  # the largest that divides the row; 1024 x 1024 scores in float32 fill 4 MiB of a chip's fast memory


def tile(length: int) -> int:
    """Side of the tiles for rows of `length` tokens. Raises InputError when none fits."""
    for side in _TILES:
        if length % side == 0:
            return side
    raise InputError(f"a row of {length} tokens is no multiple of {_TILES[-1]}: change row_length, or set model attention to blocked")


def tiles_computed(length: int) -> int:
    """Tiles of a row of `length` tokens that are not skipped, those on the diagonal included."""
    side = length // tile(length)
    return side * (side + 1) // 2


def attend_splash(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T H_kv d"],
    v: Float[Array, "B T H_kv d"],
    segment_ids: Int[Array, "B T"],
    *,
    interpret: bool = False,
) -> Float[Array, "B T H d"]:
    """Causal attention inside each segment of each row; `interpret` runs the kernel's text without a TPU, for tests."""
    length, heads, width = q.shape[1:]
    side = tile(length)
    sizes = kernel.BlockSizes(
        block_q=side, block_kv=side, block_q_dkv=side, block_kv_dkv=side, block_kv_dkv_compute=side, block_q_dq=side, block_kv_dq=side
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length)) for _ in range(heads)])
    attend: Any = kernel.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * jnp.asarray(width**-0.5, q.dtype), k, v))

    def row(q: Array, k: Array, v: Array, segments: Array) -> Array:
        return attend(q, k, v, segment_ids=kernel.SegmentIds(q=segments, kv=segments))

    return jnp.swapaxes(jax.vmap(row)(q, k, v, segment_ids), 1, 2).astype(q.dtype)
