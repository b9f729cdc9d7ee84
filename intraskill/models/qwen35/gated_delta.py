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
from jaxtyping import Array, Float, Int

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

        delta = (I + strict(beta K K^T * D))^-1 beta (V - e^c K S);    O = e^c Q S + (Q K^T * D) delta;    S <- e^c_end S + K^T (e^(c_end - c) delta)

    All products with S are shared by the value heads of a key head.

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
    num_chunks = -(-length // chunk)
    fill = num_chunks * chunk - length

    def cut(x):  # [B, T, H, ...] -> [N, B, H, C, ...]
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, fill)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, num_chunks, chunk, *x.shape[2:]), (1, 3), (0, 2))

    def cut_by_value_head(x):  # [B, T, H, G, ...] -> [N, B, H, G, C, ...]
        return jnp.moveaxis(cut(x), 4, 3)

    segments = jnp.pad(segment_ids, ((0, 0), (0, fill)), mode="edge").reshape(batch, num_chunks, chunk).swapaxes(0, 1)  # [N, B, C]
    before = jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])  # [N, B]: the segment that the incoming state belongs to
    from_state = (segments == before[..., None])[:, :, None, None]  # [N, B, 1, 1, C]
    to_state = (segments == segments[..., -1:])[:, :, None, None]
    same = (segments[..., :, None] == segments[..., None, :])[:, :, None, None]  # [N, B, 1, 1, C, C]
    column = jnp.arange(chunk)
    lower = (column[:, None] >= column[None])[None, None, None, None]
    strictly_lower = (column[:, None] > column[None])[None, None, None, None]

    q, k, v = cut(q), cut(k), cut_by_value_head(v)
    beta, total = cut_by_value_head(beta), jnp.cumsum(cut_by_value_head(g), axis=-1)  # [N, B, H, G, C]
    difference = jnp.where(same & lower, total[..., :, None] - total[..., None, :], -jnp.inf)
    decay = jnp.exp(difference)  # masked before, since above the diagonal it would overflow
    products = jnp.einsum("nbhik,nbhjk->nbhij", jnp.concatenate([k, q], axis=3), k, precision=_HIGHEST)[:, :, :, None]
    strict = jnp.where(strictly_lower, beta[..., None] * products[..., :chunk, :] * decay, 0)
    inverse = invert_unit_lower(strict.reshape(-1, chunk, chunk)).reshape(strict.shape)
    pieces = (
        jnp.concatenate([k, q], axis=3),
        v,
        beta,
        inverse,
        products[..., chunk:, :] * decay,
        jnp.where(from_state, jnp.exp(total), 0),
        jnp.where(to_state, jnp.exp(total[..., -1:] - total), 0),
    )

    def over_chunk(carried, piece):
        reader, v, beta, inverse, inner, in_decay, out_decay = piece
        read = _matmul(reader, carried.reshape(batch, heads, key_dim, group * value_dim)).reshape(batch, heads, 2 * chunk, group, value_dim)
        read = jnp.moveaxis(read, 3, 2)  # [B, H, G, 2C, V]
        delta = _matmul(inverse, beta[..., None] * (v - in_decay[..., None] * read[..., :chunk, :]))
        out = in_decay[..., None] * read[..., chunk:, :] + _matmul(inner, delta)
        written = jnp.einsum("bhck,bhgcv->bhkgv", reader[:, :, :chunk], out_decay[..., None] * delta, precision=_HIGHEST)
        return in_decay[:, :, None, :, -1, None] * carried + written, out

    if state is None:
        state = jnp.zeros((batch, heads, key_dim, group, value_dim), jnp.float32)
    state, out = lax.scan(over_chunk, state, pieces)
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [N, B, H, G, C, V] -> [B, N, C, H, G, V]
    return out.reshape(batch, num_chunks * chunk, heads, group, value_dim)[:, :length], state


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
