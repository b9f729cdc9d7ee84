"""Work on a row of tokens one piece after the other, forward and backward, so that only one piece's intermediates exist at a time.

What the backward pass finds is the row itself and what each piece was handed by the one before. It computes a piece again, then its gradients,
last piece first. JAX's own rule for a scan would keep the matrices of every layer, or run the scan once more to recover what the pieces were handed.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from intraskill.models.qwen35.config import ModelConfig
from intraskill.types import InputError


def applies(config: ModelConfig, length: int) -> bool:
    """Whether rows of `length` tokens are cut. Raises InputError when they should be and do not divide."""
    if not 0 < config.piece_length < length:
        return False
    if length % config.piece_length:
        raise InputError(f"a row of {length} tokens is no multiple of model piece_length, {config.piece_length}: change row_length or piece_length")
    return True


def cut(length: int, x: Array) -> Array:
    """[B, T, ...] -> [T / length, B, length, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, length, *x.shape[2:]), 1, 0)


def join(x: Array) -> Array:
    """The inverse of `cut`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


class Work(NamedTuple):
    """What is done with a piece. No function may close over anything that is traced.

    Attributes:
      length: tokens of a piece.
      body: `carried, out = body(matrices, carried, piece of the rows, piece of what is fixed)`.
      start: rows -> what the first piece is handed: a tree of floats, constant.
      whole: stored parameters -> the matrices to multiply with; applied once forward and once backward.
    """

    length: int
    body: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    start: Callable[[Any], Any]
    whole: Callable[[Any], Any]


def _cut_all(work: Work, rows: Any) -> Any:
    return jax.tree.map(functools.partial(cut, work.length), rows)


def _forward(work: Work, p: Any, rows: Any, fixed: Any) -> tuple[Any, Any]:
    """The outputs, and what each piece was handed."""
    matrices = work.whole(p)

    def one(carried, piece):
        after, out = work.body(matrices, carried, *piece)
        return after, (carried, out)

    _, (handed, out) = lax.scan(one, work.start(rows), (_cut_all(work, rows), fixed))
    return jax.tree.map(join, out), handed


def _backward(work: Work, p: Any, rows: Any, fixed: Any, handed: Any, d_out: Any) -> tuple[Any, Any]:
    """Gradients of the parameters and of the rows. Pieces' gradients of a matrix are added up in float32."""
    matrices, scatter = jax.vjp(work.whole, p)

    def one(carry, piece):
        d_matrices, d_after = carry
        carried, rows, fixed, d_out = piece
        _, pull = jax.vjp(lambda matrices, carried, rows: work.body(matrices, carried, rows, fixed), matrices, carried, rows)
        d_piece, d_before, d_rows = pull((d_after, d_out))
        return (jax.tree.map(lambda total, d: total + d.astype(jnp.float32), d_matrices, d_piece), d_before), d_rows

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), matrices), jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), handed)
    (d_matrices, _), d_rows = lax.scan(one, nothing, (handed, _cut_all(work, rows), fixed, _cut_all(work, d_out)), reverse=True)
    return scatter(jax.tree.map(lambda d, x: d.astype(x.dtype), d_matrices, matrices))[0], jax.tree.map(join, d_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def once(work: Work, p: Any, rows: Any, fixed: Any) -> Any:
    """Does the work on each piece of a row, and joins the outputs to [B, T, ...].

    Args:
      work: what to do.
      p: parameters.
      rows: a tree of arrays [B, T, ...].
      fixed: a tree of arrays [T / length, ...], one entry a piece, that no gradient is wanted for.
    """
    return _forward(work, p, rows, fixed)[0]


def _once_fwd(work, p, rows, fixed):
    out, handed = _forward(work, p, rows, fixed)
    return out, (p, rows, fixed, handed)


def _once_bwd(work, kept, d_out):
    p, rows, fixed, handed = kept
    d_p, d_rows = _backward(work, p, rows, fixed, handed, d_out)
    return d_p, d_rows, None


once.defvjp(_once_fwd, _once_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def layers(work: Work, p: Sequence[Any], x: Float[Array, "B T D"], fixed: Any) -> Float[Array, "B T D"]:
    """`x` through equal layers, one entry of `p` each. Scanned, since written out the compiler holds much of them at once."""
    return _layers_fwd(work, p, x, fixed)[0]


def _stack(p: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *p)


def _layers_fwd(work, p, x, fixed):
    def one(x, p):
        out, handed = _forward(work, p, x, fixed)
        return out, (x, handed)

    out, kept = lax.scan(one, x, _stack(p))
    return out, (p, fixed, kept)


def _layers_bwd(work, kept, d_out):
    p, fixed, inputs = kept

    def one(d_out, layer):
        p, (x, handed) = layer
        d_p, d_x = _backward(work, p, x, fixed, handed, d_out)
        return d_x, d_p

    d_x, d_p = lax.scan(one, d_out, (_stack(p), inputs), reverse=True)
    return [jax.tree.map(operator.itemgetter(i), d_p) for i in range(len(p))], d_x, None


layers.defvjp(_layers_fwd, _layers_bwd)
