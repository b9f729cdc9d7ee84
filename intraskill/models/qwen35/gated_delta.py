"""Gated delta rule: linear attention whose state forgets by a gate and is corrected towards what it should recall.

Per value head, with state S [K, V], unit key k, query q, value v, write strength beta and log decay g <= 0:

    S <- e^g S;    S <- S + k (beta (v - S^T k))^T;    o = S^T q

`chunked` computes it in dense pieces of C tokens and scans over the pieces, `step` does one token. Both work in float32 with full
matmul precision. Two departures from the usual chunked form:

* Segments. Several episodes share a row; each one starts from S = 0 wherever it starts, also inside a chunk. All it takes is to drop every
  product between tokens of different segments: inside the chunk, between the chunk and the incoming state, and on the way to the
  outgoing state.
* The triangular system of a chunk is inverted by blocks: 8 x 8 diagonal blocks as a product of three factors, larger ones from
  smaller ones. The product form alone is cheaper to write but sums binomial coefficients of alternating sign (1.5e8 for 32 equal keys),
  which float32 cannot.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_HIGHEST = lax.Precision.HIGHEST
_BASE = 8  # side of the diagonal blocks that are inverted by the product form; the largest coefficient there is 20


def _matmul(a: Float[Array, "... m k"], b: Float[Array, "... k n"]) -> Float[Array, "... m n"]:
    return jnp.matmul(a, b, precision=_HIGHEST)


def causal_conv(x: Float[Array, "B T H E"], weight: Float[Array, "K H E"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T H E"]:
    """Depthwise convolution over the last K tokens of the same segment, as K shifted products."""
    taps, length = weight.shape[0], x.shape[1]
    weight = weight.astype(x.dtype)[:, None, None]
    out = x * weight[taps - 1]
    for shift in range(1, min(taps, length)):
        same = segment_ids[:, shift:] == segment_ids[:, :-shift]
        earlier = jnp.where(same[:, :, None, None], x[:, :-shift], 0)
        out += jnp.pad(earlier, ((0, 0), (shift, 0), (0, 0), (0, 0))) * weight[taps - 1 - shift]
    return out


def conv_window(window: Float[Array, "B W H E"], weight: Float[Array, "K H E"]) -> Float[Array, "B T H E"]:
    """The same convolution where the K - 1 tokens before the first one are given: T = W - K + 1."""
    taps = weight.shape[0]
    length = window.shape[1] - taps + 1
    weight = weight.astype(window.dtype)[:, None, None]
    out = window[:, :length] * weight[0]
    for i in range(1, taps):
        out += window[:, i : i + length] * weight[i]
    return out


def l2_norm(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _invert(strict: Float[Array, "n C C"]) -> Float[Array, "n C C"]:
    size = strict.shape[-1]
    index = jnp.arange(size)

    def same_block(side: int):
        return (index[:, None] // side == index[None, :] // side)[None]

    power = -jnp.where(same_block(_BASE), strict, 0)
    inverse = jnp.eye(size, dtype=strict.dtype)[None] + power
    for _ in range(2):  # (I - A)(I + A^2)(I + A^4): A^8 = 0 inside a block
        power = _matmul(power, power)
        inverse += _matmul(inverse, power)
    side = _BASE
    while side < size:
        below = jnp.where(same_block(2 * side) & ~same_block(side), strict, 0)
        inverse -= _matmul(inverse, _matmul(below, inverse))
        side *= 2
    return inverse


@jax.custom_vjp
def invert_unit_lower(strict: Float[Array, "n C C"]) -> Float[Array, "n C C"]:
    """`inverse(I + strict)` for strictly lower triangular matrices, C a power of two >= 8."""
    return _invert(strict)


def _invert_fwd(strict):
    inverse = _invert(strict)
    return inverse, inverse


def _invert_bwd(inverse, grad):
    # d(X) = -X dA X. Keeps one matrix instead of every intermediate of the construction.
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-_matmul(_matmul(transposed, grad), transposed),)


invert_unit_lower.defvjp(_invert_fwd, _invert_bwd)


@jax.custom_vjp
def _carry(
    start: Float[Array, "M K V"],
    kept: Float[Array, "N M 1 1"],
    read: Float[Array, "N M C K"],
    write: Float[Array, "N M C V"],
    keys: Float[Array, "N M C K"],
) -> tuple[Float[Array, "N M K V"], Float[Array, "N M C V"], Float[Array, "M K V"]]:
    """From chunk to chunk: `delta = write - read S; S <- kept S + keys^T delta`. Returns each chunk's incoming S and delta, and the last S.

    All that is sequential, forward and backward, are these two products; the rest of the rule is done for all chunks at once.
    """
    return _carry_fwd(start, kept, read, write, keys)[0]


def _carry_fwd(start, kept, read, write, keys):
    def over_chunk(state, piece):
        kept, read, write, keys = piece
        delta = write - _matmul(read, state)
        return kept * state + _matmul(jnp.swapaxes(keys, -1, -2), delta), (state, delta)

    last, (states, deltas) = lax.scan(over_chunk, start, (kept, read, write, keys))
    return (states, deltas, last), (states, deltas, kept, read, keys)


def _carry_bwd(saved, grads):
    states, deltas, kept, read, keys = saved
    d_states, d_deltas, d_last = grads

    def over_chunk(d_state, piece):  # the gradient of the outgoing state -> of the incoming one
        d_incoming, d_delta, kept, read, keys = piece
        d_delta += _matmul(keys, d_state)
        return d_incoming + kept * d_state - _matmul(jnp.swapaxes(read, -1, -2), d_delta), (d_state, d_delta)

    d_start, (d_outgoing, d_deltas) = lax.scan(over_chunk, d_last, (d_states, d_deltas, kept, read, keys), reverse=True)
    d_kept = jnp.sum(states * d_outgoing, axis=(-2, -1), keepdims=True)
    d_read = -_matmul(d_deltas, jnp.swapaxes(states, -1, -2))
    return d_start, d_kept, d_read, d_deltas, _matmul(deltas, jnp.swapaxes(d_outgoing, -1, -2))


_carry.defvjp(_carry_fwd, _carry_bwd)


def _cut(x: Float[Array, "B T H ..."], chunk: int) -> Float[Array, "N BH C ..."]:
    """Chunks of float32, the last one filled up with zeros."""
    batch, length, heads, *rest = x.shape
    x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, -1, chunk, heads, *rest), (1, 3), (0, 2)).reshape(-1, batch * heads, chunk, *rest)


def _cut_values(x: Float[Array, "B T H G ..."], chunk: int) -> Float[Array, "N M C ..."]:
    """The same for what each value head has its own of: M = B * H * G."""
    x = jnp.moveaxis(_cut(x, chunk), 3, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _masks(segment_ids: Int[Array, "B T"], chunk: int) -> tuple[Bool[Array, "N B C C"], Bool[Array, "N B C"]]:
    """Which earlier tokens of the chunk a token reads, and whether it reads the chunk's incoming state."""
    batch, length = segment_ids.shape
    segments = jnp.pad(segment_ids, ((0, 0), (0, -length % chunk)), mode="edge").reshape(batch, -1, chunk).swapaxes(0, 1)  # [N, B, C]
    before = jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])  # [N, B]: the segment that the incoming state belongs to
    column = jnp.arange(chunk)
    same = segments[..., :, None] == segments[..., None, :]
    return same & (column[:, None] >= column[None])[None, None], segments == before[..., None]


def chunked(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H G V"],
    beta: Float[Array, "B T H G"],
    g: Float[Array, "B T H G"],
    segment_ids: Int[Array, "B T"],
    state: Float[Array, "B H K G V"] | None,
    chunk_size: int,
) -> tuple[Float[Array, "B T H G V"], Float[Array, "B H K G V"]]:
    """The rule over whole rows.

    Inside a chunk with cumulated log decay c, D_ij = exp(c_i - c_j) for j <= i, and incoming state S:

        T = (I + strict(beta K K^T * D))^-1;    delta = T beta V - (T beta e^c K) S
        O = e^c Q S + (Q K^T * D) delta;        S <- e^c_end S + (e^(c_end - c) K)^T delta

    Args:
      q: normalised and scaled queries, one per key head.
      k: normalised keys, one per key head.
      v: values, G per key head.
      beta: write strengths; 0 at padding.
      g: log decays; 0 at padding.
      segment_ids: tokens read and write only inside their segment. A given `state` belongs to the segment of the first token.
      state: where the first segment starts from; None is zero.
      chunk_size: C. Rows are filled up to a multiple of it with tokens that write nothing.

    Returns:
      The outputs, and the state after the last token (which belongs to the last token's segment).
    """
    batch, length, heads, key_dim = q.shape
    group, value_dim = v.shape[-2:]
    chunk = chunk_size
    column = jnp.arange(chunk)
    strictly_lower = (column[:, None] > column[None])[None, None]
    lower, from_state = (jnp.repeat(mask, heads * group, axis=1) for mask in _masks(segment_ids, chunk))

    def to_value_heads(x: Float[Array, "N BH C ..."]) -> Float[Array, "N M C ..."]:
        return jnp.repeat(x, group, axis=1)

    # Four axes at most: XLA's CPU kernels for sums take 5 to 20 times as long over six.
    q, k, v, beta = _cut(q, chunk), _cut(k, chunk), _cut_values(v, chunk), _cut_values(beta, chunk)[..., None]
    # Log decay from chunk start to i and from j to i. Sums of g itself, not differences of cumulated sums: those lose digits to all that came
    # before, other segments included, so that a packed row would differ from its episodes alone.
    g, triangle = _cut_values(g, chunk)[..., None], jnp.tril(jnp.ones((chunk, chunk), jnp.float32))
    summed = jnp.einsum("ic,nmcj->nmij", triangle, jnp.concatenate([jnp.where(strictly_lower, g, 0), g], axis=-1), precision=_HIGHEST)
    decay = jnp.exp(jnp.where(lower, summed[..., :chunk], -jnp.inf))
    in_decay, out_decay = jnp.where(from_state, jnp.exp(summed[..., chunk]), 0)[..., None], decay[..., -1, :, None]
    products = to_value_heads(jnp.einsum("nbik,nbjk->nbij", jnp.concatenate([k, q], axis=2), k, precision=_HIGHEST))
    q, k = to_value_heads(q), to_value_heads(k)
    strict = jnp.where(strictly_lower, beta * products[..., :chunk, :] * decay, 0)
    inverse = invert_unit_lower(strict.reshape(-1, chunk, chunk)).reshape(strict.shape)
    solved = _matmul(inverse, beta * jnp.concatenate([v, in_decay * k], axis=-1))
    if state is None:
        state = jnp.zeros((batch, heads, key_dim, group, value_dim), jnp.float32)
    start = jnp.moveaxis(state, 3, 2).reshape(-1, key_dim, value_dim)
    states, deltas, last = _carry(start, in_decay[..., -1:, :], solved[..., value_dim:], solved[..., :value_dim], out_decay * k)
    out = in_decay * _matmul(q, states) + _matmul(products[..., chunk:, :] * decay, deltas)
    out = jnp.moveaxis(out.reshape(-1, batch, heads, group, chunk, value_dim), (0, 4), (1, 2)).reshape(batch, -1, heads, group, value_dim)
    return out[:, :length], jnp.moveaxis(last.reshape(batch, heads, group, key_dim, value_dim), 2, 3)


def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H G V"],
    beta: Float[Array, "B H G"],
    g: Float[Array, "B H G"],
    state: Float[Array, "B H K G V"],
) -> tuple[Float[Array, "B H G V"], Float[Array, "B H K G V"]]:
    """The rule for one token. One product reads the old state for key and query together: o = e^g S^T q + (q . k) delta."""
    decay = jnp.exp(g)[..., None]
    read = jnp.einsum("bhck,bhkgv->bhcgv", jnp.stack([k, q], axis=2), state, precision=_HIGHEST)
    delta = beta[..., None] * (v.astype(jnp.float32) - decay * read[:, :, 0])
    out = decay * read[:, :, 1] + jnp.sum(q * k, axis=-1)[:, :, None, None] * delta
    return out, decay[:, :, None] * state + k[..., None, None] * delta[:, :, None]
