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
    weight = weight.astype(x.dtype)
    out = x * weight[taps - 1]
    for shift in range(1, min(taps, length)):
        same = segment_ids[:, shift:] == segment_ids[:, :-shift]
        earlier = jnp.where(same[:, :, None, None], x[:, :-shift], 0)
        out += jnp.pad(earlier, ((0, 0), (shift, 0), (0, 0), (0, 0))) * weight[taps - 1 - shift]
    return out


def l2_norm(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _invert(strict: Float[Array, "n C C"]) -> Float[Array, "n C C"]:
    size = strict.shape[-1]
    index = jnp.arange(size)

    def same_block(side: int):
        return index[:, None] // side == index[None, :] // side

    power = -jnp.where(same_block(_BASE), strict, 0)
    inverse = jnp.eye(size, dtype=strict.dtype) + power
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
    state: Float[Array, "B H G K V"] | None,
    chunk_size: int,
) -> tuple[Float[Array, "B T H G V"], Float[Array, "B H G K V"]]:
    """The rule over whole rows.

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
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))

    q, k, v = cut(q), cut(k), cut_by_value_head(v)
    beta, total = cut_by_value_head(beta), jnp.cumsum(cut_by_value_head(g), axis=-1)  # [N, B, H, G, C]
    difference = jnp.where(same & lower, total[..., :, None] - total[..., None, :], -jnp.inf)  # masked before exp: above the diagonal it overflows
    decay = jnp.exp(difference)
    key_products = jnp.einsum("nbhik,nbhjk->nbhij", k, k, precision=_HIGHEST)[:, :, :, None]
    inner = jnp.einsum("nbhik,nbhjk->nbhij", q, k, precision=_HIGHEST)[:, :, :, None] * decay
    strict = jnp.where(jnp.tril(lower, -1), beta[..., None] * key_products * decay, 0)
    inverse = invert_unit_lower(strict.reshape(-1, chunk, chunk)).reshape(strict.shape)

    in_decay = jnp.where(from_state, jnp.exp(total), 0)[..., None]
    out_decay = jnp.where(to_state, jnp.exp(total[..., -1:] - total), 0)[..., None]
    keep = jnp.where(from_state[..., -1], jnp.exp(total[..., -1]), 0)[..., None, None]
    keys = k[:, :, :, None]
    written = _matmul(inverse, beta[..., None] * v)
    recalled = _matmul(inverse, beta[..., None] * in_decay * keys)

    def over_chunk(carried, piece):
        written, recalled, inner, query, key, keep = piece
        new = written - _matmul(recalled, carried)
        out = _matmul(query, carried) + _matmul(inner, new)
        return keep * carried + jnp.einsum("bhgck,bhgcv->bhgkv", key, new, precision=_HIGHEST), out

    if state is None:
        state = jnp.zeros((batch, heads, group, key_dim, value_dim), jnp.float32)
    state, out = lax.scan(over_chunk, state, (written, recalled, inner, q[:, :, :, None] * in_decay, keys * out_decay, keep))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [N, B, H, G, C, V] -> [B, N, C, H, G, V]
    return out.reshape(batch, num_chunks * chunk, heads, group, value_dim)[:, :length], state


def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H G V"],
    beta: Float[Array, "B H G"],
    g: Float[Array, "B H G"],
    state: Float[Array, "B H G K V"],
) -> tuple[Float[Array, "B H G V"], Float[Array, "B H G K V"]]:
    """The rule for one token. One product reads the old state for key and query together; o follows from S^T q + (q . k) delta."""
    decay = jnp.exp(g)[..., None]
    read = jnp.einsum("bhck,bhgkv->bhgcv", jnp.stack([k, q], axis=2), state, precision=_HIGHEST) * decay[..., None]
    delta = beta[..., None] * (v.astype(jnp.float32) - read[:, :, :, 0])
    out = read[:, :, :, 1] + jnp.sum(q * k, axis=-1)[:, :, None, None] * delta
    return out, decay[..., None] * state + k[:, :, None, :, None] * delta[:, :, :, None, :]
