"""Declaration of the parameters: one line each for shape, logical axes and initialiser.

Flax NNX modules declare, plain functions compute. The modules hold no forward pass; they are built once (abstractly, or to draw initial
values) and their state leaves this file as nested dicts of arrays, so that jit, optax and Orbax see an ordinary pytree:

    {"embed": [V, D], "final_norm": [D], "head": [V, D] (untied only),
     "layers": {"0": {...}, "1": {...}, ...}}       one entry per layer; with config.scan_layers one per layer of a block, stacked over blocks

A linear-attention head is a *key head with its value heads*: its query, key and values lie together along the last axis of `qkv`. The
published layout puts all queries first, then all keys, then all values, which cannot be cut by head with a contiguous slice.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from intraskill.models.qwen35.config import ModelConfig

Params = dict[str, Any]
Init = Callable[[PRNGKeyArray, Sequence[int], Any], Array]


def _fan_in(fan_in: int, gain: float = 1.0) -> Init:
    return jax.nn.initializers.normal(gain * fan_in**-0.5)


def _a_log(key: PRNGKeyArray, shape: Sequence[int], dtype: Any) -> Float[Array, "..."]:
    """Decay rates spread from almost none to strong, as in state-space models."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.02, 4.0)).astype(dtype)


def _dt_bias(key: PRNGKeyArray, shape: Sequence[int], dtype: Any) -> Float[Array, "..."]:
    """Inverse softplus of step sizes that are log-uniform in [1e-3, 1e-1]."""
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(1e-3), jnp.log(1e-1)))
    return jnp.log(jnp.expm1(step)).astype(dtype)


_ZEROS = jax.nn.initializers.zeros
_ONES = jax.nn.initializers.ones


class _Declarations(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self._dtype, self._rngs = jnp.dtype(config.param_dtype), rngs

    def _param(self, shape: Sequence[int], axes: Sequence[str | None], init: Init) -> nnx.Param:
        assert len(shape) == len(axes)
        return nnx.Param(init(self._rngs.params(), tuple(shape), self._dtype), axes=tuple(axes))


class LinearAttention(_Declarations):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        d, heads, group = config.hidden_size, config.linear_num_key_heads, config.value_heads_per_key_head
        channels, values = config.conv_channels_per_head, group * config.linear_value_head_dim
        residual = (2 * config.num_layers) ** -0.5
        self.qkv = self._param((d, heads, channels), ("embed", "heads", None), _fan_in(d))
        self.z = self._param((d, heads, values), ("embed", "heads", None), _fan_in(d))
        self.ba = self._param((d, heads, 2 * group), ("embed", "heads", None), _fan_in(d))  # betas of the head's value heads, then decays
        self.conv = self._param((config.conv_kernel, heads, channels), (None, "heads", None), _fan_in(config.conv_kernel))
        self.a_log = self._param((heads, group), ("heads", None), _a_log)
        self.dt_bias = self._param((heads, group), ("heads", None), _dt_bias)
        self.norm = self._param((config.linear_value_head_dim,), (None,), _ONES)
        self.out = self._param((heads, values, d), ("heads", None, "embed"), _fan_in(heads * values, residual))


class FullAttention(_Declarations):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        d, heads, kv_heads, width = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        residual = (2 * config.num_layers) ** -0.5
        self.q = self._param((d, heads, 2 * width), ("embed", "heads", None), _fan_in(d))  # the query, then its output gate
        self.kv = self._param((d, kv_heads, 2 * width), ("embed", "kv_heads", None), _fan_in(d))  # the key, then its value
        self.q_norm = self._param((width,), (None,), _ZEROS)
        self.k_norm = self._param((width,), (None,), _ZEROS)
        self.out = self._param((heads, width, d), ("heads", None, "embed"), _fan_in(heads * width, residual))


class Mlp(_Declarations):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        d, f = config.hidden_size, config.intermediate_size
        self.gate_up = self._param((d, 2, f), ("embed", None, "mlp"), _fan_in(d))
        self.down = self._param((f, d), ("mlp", "embed"), _fan_in(f, (2 * config.num_layers) ** -0.5))


class Layer(_Declarations):
    def __init__(self, config: ModelConfig, full: bool, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.attention_norm = self._param((config.hidden_size,), ("norm",), _ZEROS)
        self.mlp_norm = self._param((config.hidden_size,), ("norm",), _ZEROS)
        if full:
            self.full = FullAttention(config, rngs)
        else:
            self.linear = LinearAttention(config, rngs)
        self.mlp = Mlp(config, rngs)


class Ends(_Declarations):
    """What lies around the layers."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        table = (config.vocab_size, config.hidden_size)
        self.embed = self._param(table, ("vocab", "embed"), _fan_in(config.hidden_size))
        self.final_norm = self._param((config.hidden_size,), ("norm",), _ZEROS)
        if not config.tie_embeddings:
            self.head = self._param(table, ("vocab", "embed"), _fan_in(config.hidden_size))


def init_params(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Draws initial parameters. A layer's values depend on the key and its index only, not on whether layers are stacked."""

    def draw(declare: Callable[[nnx.Rngs], nnx.Module], index: int) -> Params:
        return nnx.to_pure_dict(nnx.state(declare(nnx.Rngs(params=jax.random.fold_in(key, index))), nnx.Param))

    layers = [draw(functools.partial(Layer, config, config.is_full(i)), i) for i in range(config.num_layers)]
    return {**draw(functools.partial(Ends, config), config.num_layers), "layers": join_layers(config, layers)}


def abstract_params(config: ModelConfig) -> Params:
    """The same tree with `jax.ShapeDtypeStruct` leaves; computes nothing."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def logical_axes(config: ModelConfig) -> Params:
    """The same tree with, for each parameter, the tuple of its logical axes."""

    def axes(declare: Callable[[nnx.Rngs], nnx.Module], stacked: bool) -> Params:
        state = nnx.state(nnx.eval_shape(lambda: declare(nnx.Rngs(params=0))), nnx.Param)
        named = jax.tree.map(
            lambda v: (("blocks",) if stacked else ()) + v.get_metadata()["axes"], state, is_leaf=lambda v: isinstance(v, nnx.Variable)
        )
        return nnx.to_pure_dict(named)

    layers = {str(i): axes(functools.partial(Layer, config, config.is_full(i)), config.scan_layers) for i in range(config.num_entries)}
    return {**axes(functools.partial(Ends, config), False), "layers": layers}


def join_layers(config: ModelConfig, layers: Sequence[Params]) -> Params:
    """All layers' own trees, in order -> the "layers" entry."""
    if not config.scan_layers:
        return {str(i): layer for i, layer in enumerate(layers)}
    period = config.full_attention_interval
    return {str(i): jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers[i::period]) for i in range(period)}


def layer_params(config: ModelConfig, params: Params, layer: int) -> Params:
    """One layer's own tree, cut out of its stack where there is one."""
    if not config.scan_layers:
        return params["layers"][str(layer)]
    block, entry = divmod(layer, config.full_attention_interval)
    return jax.tree.map(lambda leaf: leaf[block], params["layers"][str(entry)])
