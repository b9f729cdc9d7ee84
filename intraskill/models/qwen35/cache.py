"""What each slot of an engine remembers: keys and values of full layers, convolution window and recurrent state of linear layers.

The cache is a pytree with a fixed shape, so that slots can change owners without recompiling. Bytes a token per full layer:
2 * num_kv_heads * head_dim * itemsize; a linear layer costs the same whatever the length:
4 * value heads * key_dim * value_dim, plus (conv_kernel - 1) * channels * itemsize.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from intraskill.models.qwen35.config import ModelConfig


class Cache(NamedTuple):
    """State of B slots.

    Attributes:
      length: tokens that each slot holds.
      layers: one entry per layer, by index. Full: `k`, `v` [B, H_kv, S, d]. Linear: `conv` [B, conv_kernel - 1, H, E], the newest inputs of the
        convolution, oldest first, and `state` [B, H, K, G, V], float32.
    """

    length: Int[Array, " B"]
    layers: dict[str, dict[str, Float[Array, "B ..."]]]

    @property
    def max_length(self) -> int | None:
        """Tokens that fit into a slot; None when no layer keeps keys."""
        return next((layer["k"].shape[2] for layer in self.layers.values() if "k" in layer), None)


def init_cache(config: ModelConfig, num_slots: int, max_length: int, dtype: Any = None) -> Cache:
    """Empty slots. `dtype` is that of keys, values and convolution windows, the activations' unless given."""
    dtype = jnp.dtype(dtype or config.dtype)
    heads = config.linear_num_key_heads

    def layer(full: bool) -> dict[str, Array]:
        if full:
            shape = (num_slots, config.num_kv_heads, max_length, config.head_dim)
            return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}
        state = (num_slots, heads, config.linear_key_head_dim, config.value_heads_per_key_head, config.linear_value_head_dim)
        return {
            "conv": jnp.zeros((num_slots, config.conv_kernel - 1, heads, config.conv_channels_per_head), dtype),
            "state": jnp.zeros(state, jnp.float32),
        }

    return Cache(jnp.zeros(num_slots, jnp.int32), {str(i): layer(config.is_full(i)) for i in range(config.num_layers)})


def gather_slots(cache: Cache, slots: Int[Array, " N"]) -> Cache:
    """A smaller cache with copies of the given slots, e.g. to prefill a few of them."""
    return jax.tree.map(lambda x: x[slots], cache)


def scatter_slots(cache: Cache, part: Cache, slots: Int[Array, " N"]) -> Cache:
    """Writes the slots of `part` over the given slots of `cache`; indices beyond the last slot are dropped."""
    # A negative index would wrap around to a slot that somebody else uses.
    slots = jnp.where(slots < 0, cache.length.shape[0], slots)
    return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), cache, part)


def copy_slots(cache: Cache, src: Int[Array, " N"], dst: Int[Array, " N"]) -> Cache:
    """Slot dst[i] becomes what slot src[i] was; a dst out of range is dropped. Shares a prompt's prefill among the episodes of a group."""
    return scatter_slots(cache, gather_slots(cache, src), dst)


def reset_slots(cache: Cache, mask: Bool[Array, " B"]) -> Cache:
    """Empties the slots under `mask`. Old keys and values stay in memory but lie beyond the length, where nothing reads them."""

    def clear(x: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros((), x.dtype), x)

    layers = {i: layer if "k" in layer else jax.tree.map(clear, layer) for i, layer in cache.layers.items()}
    return Cache(jnp.where(mask, 0, cache.length), layers)
