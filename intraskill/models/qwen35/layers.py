"""Pieces that both kinds of layer use: projections, norms, rotation, MLP. Norms and rotation run in float32 whatever the activation dtype."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from intraskill.models.qwen35.config import ModelConfig


def precision(dtype: Any) -> lax.Precision | None:
    """float32 products are rounded to bfloat16 passes on TPU unless asked not to; for bfloat16 there is nothing to ask."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.einsum(spec, x, weight, precision=precision(x.dtype))


def _product_fwd(spec: str, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(spec, x, weight), (x, weight)


def _product_bwd(spec: str, kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    (left, right), out = spec.split("->")[0].split(","), spec.split("->")[1]
    x, weight = kept
    dx = jnp.einsum(f"{out},{right}->{left}", grad, weight, precision=precision(x.dtype))
    # With x on the left the compiler transposes x. JAX's own rule has grad there, which tends to be wider: twice as slow on CPU.
    return dx, jnp.einsum(f"{left},{out}->{right}", x, grad, precision=precision(x.dtype))


_product.defvjp(_product_fwd, _product_bwd)


def project(spec: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """`einsum(spec, x, weight)` in the dtype of `x`. No letter may occur in all three."""
    return _product(spec, x, weight.astype(x.dtype))


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """`x / rms(x) * (1 + weight)`: the weight is centred on zero, and applied before the cast back."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * jnp.expand_dims(1.0 + weight.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)


def rotation(config: ModelConfig, positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Cosines and sines of the rotary embedding, the same for all heads of all layers."""
    half = config.rotary_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B T H d"], cos: Float[Array, "B T 1 half"], sin: Float[Array, "B T 1 half"]) -> Float[Array, "B T H d"]:
    """Rotates the leading `2 * half` entries of each head, first half against second; the others pass."""
    half = cos.shape[-1]
    x32 = x[..., : 2 * half].astype(jnp.float32)
    first, second = x32[..., :half], x32[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)


def mlp(p: dict[str, Any], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Gated SiLU."""
    gate_up = project("btd,dcf->btcf", x, p["gate_up"])
    return project("btf,fd->btd", jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1], p["down"])
