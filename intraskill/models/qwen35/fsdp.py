"""Log-probs on a (data, fsdp, tensor) mesh, with every exchange between devices written out.

Inside one `shard_map` each device runs the model's own functions on its rows:

* A layer's matrices are cast to the activation dtype and gathered over `fsdp` right before use, again in the backward pass; gradients go back
  summed in float32, to the device that owns the piece.
* Over `tensor` a device holds some heads and MLP columns; what it adds to the residual is summed.
* No device ever holds the whole vocabulary matrix. Embedding: all devices look every token up in their own columns, and exchange
  the results. Log-probs: the matrix arrives in slices of the vocabulary, and maximum, sum and entropy are updated from slice to slice.

Leaving this to the compiler gathers matrices in float32, or whole, or inside the wrong loop, as it sees fit.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from intraskill.models.qwen35.attention import MASKED
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.layers import precision, rms_norm, rotation
from intraskill.models.qwen35.model import LogProbs, layers, through_layers
from intraskill.models.qwen35.params import Params, logical_axes
from intraskill.models.qwen35.sharding import ROWS, partition_spec

_LOGITS_AT_ONCE = 1 << 26  # entries of float32 logits that exist at a time on a device: 256 MiB


# ------------------------------------------------------------------------------------------------------------- parameters


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(piece: Float[Array, "..."], axis: int, dtype: Any) -> Float[Array, "..."]:
    """The whole of a matrix that is cut along `axis` over fsdp, in `dtype`."""
    return lax.all_gather(piece.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_fwd(piece, axis, dtype):
    return gather(piece, axis, dtype), jnp.zeros((), piece.dtype)


def _gather_bwd(axis, dtype, of_piece, grad):
    del dtype
    return (lax.psum_scatter(grad.astype(jnp.float32), "fsdp", scatter_dimension=axis, tiled=True).astype(of_piece.dtype),)


gather.defvjp(_gather_fwd, _gather_bwd)


def _gather_layer(axes: Params, p: Params, dtype: Any) -> Params:
    def whole(axes: tuple[str | None, ...], piece: Array) -> Array:
        spec = partition_spec(axes[-piece.ndim :])
        return gather(piece, spec.index("fsdp"), dtype) if "fsdp" in spec else piece

    return jax.tree.map(whole, axes, p, is_leaf=lambda x: isinstance(x, tuple))


# ------------------------------------------------------------------------------------------------------------- vocabulary


def _embed(table: Float[Array, "V_t D_n"], tokens: Int[Array, "R T"], dtype: Any) -> Float[Array, "R T D"]:
    ids = lax.all_gather(tokens, "fsdp") - lax.axis_index("tensor") * table.shape[0]
    here = (ids >= 0) & (ids < table.shape[0])
    columns = jnp.where(here[..., None], table[jnp.where(here, ids, 0)].astype(dtype), 0)  # [n, R, T, D_n]
    columns = lax.psum(columns, "tensor")
    return lax.all_to_all(columns, "fsdp", split_axis=0, concat_axis=3, tiled=True)[0]


def slice_rows(vocabulary: int, num_tokens: int) -> int:
    """Rows of the vocabulary matrix in a slice: the largest divisor that keeps the logits of all tokens small."""
    most = max(1, min(vocabulary, _LOGITS_AT_ONCE // num_tokens))
    return next(size for size in range(most, 0, -1) if vocabulary % size == 0)


class _Slice(NamedTuple):
    table: Float[Array, "v D_n"]
    banned: Bool[Array, " v"]
    first: Int[Array, ""]


def _slices(table: Float[Array, "V_t D_n"], banned: Bool[Array, " V_t"], num_tokens: int) -> _Slice:
    rows = slice_rows(table.shape[0], num_tokens)
    first = lax.axis_index("tensor") * table.shape[0] + jnp.arange(0, table.shape[0], rows, dtype=jnp.int32)
    return _Slice(table.reshape(-1, rows, table.shape[1]), banned.reshape(-1, rows), first)


def _scores(hidden: Float[Array, "n D"], matrix: Float[Array, "v D"], banned: Bool[Array, " v"], temperature: float) -> Float[Array, "n v"]:
    scores = jnp.einsum("nd,vd->nv", hidden, matrix, precision=precision(hidden.dtype), preferred_element_type=jnp.float32) / temperature
    return jnp.where(banned[None], MASKED, scores)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _score(
    hidden: Float[Array, "n D"], table: Float[Array, "V_t D_n"], targets: Int[Array, " n"], banned: Bool[Array, " V_t"], temperature: float
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Log-probs and entropies of tokens on this device."""
    return _score_fwd(hidden, table, targets, banned, temperature)[0]


def _score_fwd(hidden, table, targets, banned, temperature):
    def read(carried, piece: _Slice):
        top, total, weighted, chosen = carried
        scores = _scores(hidden, lax.all_gather(piece.table.astype(hidden.dtype), "fsdp", axis=1, tiled=True), piece.banned, temperature)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        exp, scale = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
        column = targets - piece.first
        inside = (column >= 0) & (column < scores.shape[1])
        at = jnp.take_along_axis(scores, jnp.where(inside, column, 0)[:, None], axis=-1)[:, 0]
        return (
            new_top,
            total * scale + jnp.sum(exp, axis=-1),
            weighted * scale + jnp.sum(exp * scores, axis=-1),
            chosen + jnp.where(inside, at, 0),
        ), None

    zero = jnp.zeros(hidden.shape[0], jnp.float32)
    (top, total, weighted, chosen), _ = lax.scan(read, (zero + MASKED, zero, zero, zero), _slices(table, banned, hidden.shape[0]))
    best = lax.pmax(top, "tensor")
    total, weighted = (lax.psum(x * jnp.exp(top - best), "tensor") for x in (total, weighted))
    log_total = best + jnp.log(total)
    logprob, entropy = lax.psum(chosen, "tensor") - log_total, log_total - weighted / total
    return (logprob, entropy), (hidden, table, targets, banned, log_total, entropy)


def _score_bwd(temperature, saved, grads):
    hidden, table, targets, banned, log_total, entropy = saved
    # Each of the devices that share a token was given an equal part of its gradient.
    grad_logprob, grad_entropy = (lax.psum(g, "tensor") for g in grads)

    def read(grad_hidden, piece: _Slice):
        matrix = lax.all_gather(piece.table.astype(hidden.dtype), "fsdp", axis=1, tiled=True)
        log_p = _scores(hidden, matrix, piece.banned, temperature) - log_total[:, None]
        p = jnp.exp(log_p)
        is_target = (targets - piece.first)[:, None] == jnp.arange(p.shape[1], dtype=jnp.int32)[None]
        grad = grad_logprob[:, None] * (is_target.astype(jnp.float32) - p) - grad_entropy[:, None] * p * (log_p + entropy[:, None])
        grad = jnp.where(piece.banned[None], 0, grad / temperature).astype(hidden.dtype)
        exact = {"precision": precision(hidden.dtype), "preferred_element_type": jnp.float32}
        grad_matrix = jnp.einsum("nv,nd->vd", grad, hidden, **exact)
        grad_piece = lax.psum_scatter(grad_matrix, "fsdp", scatter_dimension=1, tiled=True).astype(table.dtype)
        return grad_hidden + jnp.einsum("nv,vd->nd", grad, matrix, **exact), grad_piece

    grad_hidden, grad_table = lax.scan(read, jnp.zeros(hidden.shape, jnp.float32), _slices(table, banned, hidden.shape[0]))
    return grad_hidden.astype(hidden.dtype), grad_table.reshape(table.shape), None, None


_score.defvjp(_score_fwd, _score_bwd)


# -------------------------------------------------------------------------------------------------------------- log-probs


def _on_device(
    config: ModelConfig,
    temperature: float,
    params: Params,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    index: Array,
    targets: Array,
    banned: Array,
) -> LogProbs:
    axes = logical_axes(config)
    cos, sin = rotation(config, positions)
    kinds = {"full" if "full" in a else "linear": a for a in axes["layers"].values()}

    def some(entries, x):
        whole = functools.partial(_gather_layer, kinds["full" if "full" in entries[0] else "linear"], dtype=config.activation_dtype)
        return layers(config, entries, x, cos, sin, segment_ids, whole, lambda out: lax.psum(out, "tensor"))

    x = through_layers(config, params["layers"], _embed(params["embed"], tokens, config.activation_dtype), some)
    wanted = jnp.take_along_axis(x, index[:, :, None], axis=1).reshape(-1, config.hidden_size)
    hidden = rms_norm(wanted, params["final_norm"], config.rms_eps)
    table = params["embed"] if config.tie_embeddings else params["head"]
    scored: Any = _score(hidden, table, targets.reshape(-1), banned, temperature)
    logprob, entropy = scored
    return LogProbs(logprob.reshape(index.shape), entropy.reshape(index.shape))


def log_probs(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    index: Int[Array, "R M"],
    targets: Int[Array, "R M"],
    *,
    mesh: Mesh,
    temperature: float = 1.0,
    banned: Bool[Array, " V"] | None = None,
) -> LogProbs:
    """`model.log_probs`, with parameters cut as `sharding.param_shardings` says and rows spread over data and fsdp."""
    specs = jax.tree.map(partition_spec, logical_axes(config), is_leaf=lambda x: isinstance(x, tuple))
    run = jax.shard_map(
        functools.partial(_on_device, config, temperature),
        mesh=mesh,
        in_specs=(specs, *[ROWS] * 5, P("tensor")),
        out_specs=ROWS,
        check_vma=False,  # the attention kernel does not say over which axes its results vary
    )
    if banned is None:
        banned = jnp.zeros(config.vocab_size, bool)
    return run(params, tokens, positions, segment_ids, index, targets, banned)
