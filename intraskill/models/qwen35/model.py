"""Dense Qwen3.5 as pure functions of (params, config, ...): hidden states, log-probs, logits.

Rows may hold several segments (episodes) one after the other. A token sees only its own segment in attention, convolution and recurrent
state, so a packed row gives what its segments give alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from intraskill.models.qwen35 import pieces
from intraskill.models.qwen35.attention import MASKED, attend_cached, attend_packed
from intraskill.models.qwen35.cache import Cache
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.gated_delta import causal_conv, chunked, conv_window, l2_norm, step
from intraskill.models.qwen35.layers import mlp, precision, project, rms_norm, rotate, rotation
from intraskill.models.qwen35.params import Params, abstract_params, init_params, layer_params

__all__ = ["LogProbs", "abstract_params", "extend", "forward", "init_params", "log_probs", "logits"]

_LOGITS_AT_ONCE = 1 << 24  # entries of the float32 logits that may exist at a time


class LogProbs(NamedTuple):
    """Log-probs of targets and entropies of the distributions they are drawn from, float32."""

    logprob: Float[Array, "R M"]
    entropy: Float[Array, "R M"]


# ---------------------------------------------------------------------------------------------------------- token mixers


def split_conv(config: ModelConfig, mixed: Float[Array, "B T H E"]) -> tuple[Array, Array, Array]:
    """Convolved channels -> unit queries (scaled) and keys [B, T, H, K] in float32, and values [B, T, H, G, V]."""
    width = config.linear_key_head_dim
    q, k, v = jnp.split(mixed, [width, 2 * width], axis=-1)
    return l2_norm(q) * width**-0.5, l2_norm(k), v.reshape(*v.shape[:-1], config.value_heads_per_key_head, config.linear_value_head_dim)


def gates(p: dict[str, Any], x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H G"], Float[Array, "B T H G"]]:
    """Write strength and log decay per value head, float32."""
    b, a = jnp.split(project("btd,dhc->bthc", x, p["ba"]), 2, axis=-1)
    decay = jax.nn.softplus(a.astype(jnp.float32) + p["dt_bias"].astype(jnp.float32)[None, None])
    return jax.nn.sigmoid(b).astype(jnp.float32), -jnp.exp(p["a_log"].astype(jnp.float32))[None, None] * decay


def linear_out(config: ModelConfig, p: dict[str, Any], out: Float[Array, "B T H G V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Norm per value head, gate by z, project back. Unlike the other norms, this one's weight is a plain factor and comes after the cast."""
    out = out.astype(x.dtype).astype(jnp.float32)
    normed = (out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + config.rms_eps)).astype(x.dtype)
    normed = normed * jnp.expand_dims(p["norm"].astype(x.dtype), range(4))
    z = project("btd,dhe->bthe", x, p["z"]).astype(jnp.float32)
    gated = (normed.reshape(z.shape).astype(jnp.float32) * jax.nn.silu(z)).astype(x.dtype)
    return project("bthe,hed->btd", gated, p["out"])


def _mixed(x: Float[Array, "B T H E"], conv: Array, segment_ids: Int[Array, "B T"]) -> Float[Array, "B T H E"]:
    # Fused with the convolution's shifts, the silu runs unvectorised on CPU: 11 ms instead of 2.
    return jax.nn.silu(lax.optimization_barrier(causal_conv(x, conv, segment_ids)))


def _linear_attention(config: ModelConfig, p: dict[str, Any], x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    beta, g = gates(p, x)
    real = (segment_ids > 0)[:, :, None, None]
    raw = project("btd,dhe->bthe", x, p["qkv"])
    beta, g = jnp.where(real, beta, 0), jnp.where(real, g, 0)
    q, k, v = split_conv(config, _mixed(raw, p["conv"], segment_ids))
    out, _ = chunked(q, k, v, beta, g, segment_ids, None, config.chunk_size)
    return linear_out(config, p, out, x)


def attention_inputs(config: ModelConfig, p: dict[str, Any], x: Float[Array, "B T D"], cos: Array, sin: Array) -> tuple[Array, Array, Array, Array]:
    """Queries and their output gates [B, T, H, d], keys and values [B, T, H_kv, d]; queries and keys normalised and rotated."""
    q, gate = jnp.split(project("btd,dhc->bthc", x, p["q"]), 2, axis=-1)
    q, k, v = _turned(config, p, q, project("btd,dhc->bthc", x, p["kv"]), cos, sin)
    return q, gate, k, v


def _turned(config: ModelConfig, p: dict[str, Any], q: Array, kv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
    k, v = jnp.split(kv, 2, axis=-1)
    return rotate(rms_norm(q, p["q_norm"], config.rms_eps), cos, sin), rotate(rms_norm(k, p["k_norm"], config.rms_eps), cos, sin), v


def attention_out(p: dict[str, Any], out: Float[Array, "B T H d"], gate: Float[Array, "B T H d"]) -> Float[Array, "B T D"]:
    return project("bthd,hdo->bto", out * jax.nn.sigmoid(gate), p["out"])


def _attend(config: ModelConfig, q: Array, k: Array, v: Array, segment_ids: Int[Array, "B T"]) -> Float[Array, "B T H d"]:
    if config.attention == "splash":
        from intraskill.models.qwen35.splash import attend_splash  # most of a second to import, and only TPUs have a use for it

        return attend_splash(q, k, v, segment_ids)
    return attend_packed(q, k, v, segment_ids)


def _full_attention(
    config: ModelConfig, p: dict[str, Any], x: Float[Array, "B T D"], cos: Array, sin: Array, segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    q, gate, k, v = attention_inputs(config, p, x, cos, sin)
    return attention_out(p, _attend(config, q, k, v, segment_ids), gate)


# --------------------------------------------------------------------------------------------------------------- forward


def embed(params: Params, config: ModelConfig, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    return params["embed"].astype(config.activation_dtype)[tokens]


def _unchanged(x: Any) -> Any:
    return x


def layers(
    config: ModelConfig,
    entries: Sequence[Params],
    x: Float[Array, "B T D"],
    cos: Array,
    sin: Array,
    segment_ids: Int[Array, "B T"],
    whole: Callable[[Params], Params] = _unchanged,
    total: Callable[[Array], Array] = _unchanged,
) -> Float[Array, "B T D"]:
    """Layers of one kind, one after the other.

    `whole` makes of the stored parameters those to compute with. `total` adds up what devices that hold different heads and MLP columns contribute
    to the residual. Neither may close over traced values.
    """
    full, in_pieces = "full" in entries[0], pieces.applies(config, x.shape[1])
    if in_pieces and not full:
        return _linear_in_pieces(config, entries, x, segment_ids, whole, total)
    for p in entries:
        if in_pieces:
            # Backward, the barrier keeps the linear layers waiting for these matrices' gradients, which otherwise lie about whole until the end.
            p, x = lax.optimization_barrier((p, x))
            x = _full_in_pieces(config, whole(p), x, cos, sin, segment_ids, total)
            continue
        p = whole(p)
        h = rms_norm(x, p["attention_norm"], config.rms_eps)
        if full:
            with jax.named_scope("full_attention"):
                x = x + total(_full_attention(config, p["full"], h, cos, sin, segment_ids))
        else:
            with jax.named_scope("linear_attention"):
                x = x + total(_linear_attention(config, p["linear"], h, segment_ids))
        with jax.named_scope("mlp"):
            x = x + total(mlp(p["mlp"], rms_norm(x, p["mlp_norm"], config.rms_eps)))
    return x


def _linear_in_pieces(
    config: ModelConfig,
    entries: Sequence[Params],
    x: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
    whole: Callable[[Params], Params],
    total: Callable[[Array], Array],
) -> Float[Array, "B T D"]:
    """All of a layer for one piece of the row, then for the next, which is handed the state and the convolution's last inputs."""
    past, length = config.conv_kernel - 1, config.piece_length
    heads, channels = entries[0]["linear"]["conv"].shape[1:]

    def start(x):
        state = (x.shape[0], heads, config.linear_key_head_dim, config.value_heads_per_key_head, config.linear_value_head_dim)
        return jnp.zeros(state, jnp.float32), jnp.zeros((x.shape[0], past, heads, channels), x.dtype)

    @jax.checkpoint  # the convolution's shifted inputs are as many again as its taps
    def convolved(window, conv, segments):
        return split_conv(config, _mixed(window, conv, segments)[:, past:])

    def body(p, carried, x, segments):  # segments: of the piece, and of the past + 1 tokens before it
        state, window = carried
        with jax.named_scope("linear_attention"):
            linear, h = p["linear"], rms_norm(x, p["attention_norm"], config.rms_eps)
            beta, g = gates(linear, h)
            window = jnp.concatenate([window, project("btd,dhe->bthe", h, linear["qkv"])], axis=1)
            q, k, v = convolved(window, linear["conv"], segments[:, 1:])
            state = jnp.where((segments[:, past] == segments[:, past + 1])[:, None, None, None, None], state, 0)
            segments = segments[:, past + 1 :]
            real = (segments > 0)[:, :, None, None]
            out, state = chunked(q, k, v, jnp.where(real, beta, 0), jnp.where(real, g, 0), segments, state, config.chunk_size)
            x = x + total(linear_out(config, linear, out, h))
        with jax.named_scope("mlp"):
            x = x + total(mlp(p["mlp"], rms_norm(x, p["mlp_norm"], config.rms_eps)))
        return (state, window[:, length:]), x

    longer = jnp.pad(segment_ids, ((0, 0), (past + 1, 0)), constant_values=-1)
    segments = jnp.stack([longer[:, i : i + past + 1 + length] for i in range(0, x.shape[1], length)])
    return pieces.layers(pieces.Work(length, body, start, whole), entries, x, segments)


def _full_in_pieces(
    config: ModelConfig, p: Params, x: Float[Array, "B T D"], cos: Array, sin: Array, segment_ids: Int[Array, "B T"], total: Callable[[Array], Array]
) -> Float[Array, "B T D"]:
    """Only attention itself sees the whole row; what comes before and after it goes by pieces, its output gate with what comes after."""
    length, width = config.piece_length, config.head_dim

    def before(p, _, x, rotary):
        h = rms_norm(x, p["norm"], config.rms_eps)
        q, kv = (project("btd,dhc->bthc", h, p[name]) for name in ("q", "kv"))
        return (), _turned(config, p, q, kv, *rotary)

    def after(p, _, rows, __):
        x, out = rows
        gate = project("btd,dhc->bthc", rms_norm(x, p["norm"], config.rms_eps), p["gate"])
        x = x + total(attention_out(p, out, gate))
        return (), x + total(mlp(p["mlp"], rms_norm(x, p["mlp_norm"], config.rms_eps)))

    def work(body):
        return pieces.Work(length, body, lambda rows: (), _unchanged)

    full = dict(p["full"])
    query, gate = jnp.split(full.pop("q"), [width], axis=-1)
    last = {"gate": gate, "out": full.pop("out"), "norm": p["attention_norm"], "mlp": p["mlp"], "mlp_norm": p["mlp_norm"]}
    first = {**full, "q": query, "norm": p["attention_norm"]}
    with jax.named_scope("full_attention"):
        entered: Any = pieces.once(work(before), first, x, tuple(pieces.cut(length, part) for part in (cos, sin)))
        q, k, v = entered
        out = _attend(config, q, k, v, segment_ids)
    with jax.named_scope("mlp"):
        return pieces.once(work(after), last, (x, out), ())


def through_layers(
    config: ModelConfig, params: Params, x: Float[Array, "B T D"], some: Callable[[Sequence[Params], Array], Array]
) -> Float[Array, "B T D"]:
    """`some(entries, x)` for all layers, those of one kind in turn, under the configured remat and scan."""
    again = jax.checkpoint(some) if config.remat == "layer" else some
    in_pieces = pieces.applies(config, x.shape[1])

    def block(x, entries):
        linear, full = entries[:-1], entries[-1:]
        if in_pieces and linear:  # they compute themselves again
            x, entries = some(linear, x), full
        for p in entries:
            x = again([p], x)
        return x

    if config.remat == "block":
        block = jax.checkpoint(block)
    period = config.full_attention_interval
    entries = [params[str(i)] for i in range(config.num_entries)]
    if config.scan_layers:
        through: tuple[Any, None] = lax.scan(lambda x, entries: (block(x, entries), None), x, entries)
        return through[0]
    for first in range(0, config.num_layers, period):
        x = block(x, entries[first : first + period])
    return x


def forward(
    params: Params, config: ModelConfig, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm.

    Args:
      params: tree of `init_params`.
      config: static.
      tokens: token ids.
      positions: index inside the segment, from 0.
      segment_ids: 1, 2, ... for the segments of a row, contiguous; 0 for padding, only at the row's end.
    """
    cos, sin = rotation(config, positions)
    x = through_layers(config, params["layers"], embed(params, config, tokens), lambda entries, x: layers(config, entries, x, cos, sin, segment_ids))
    return rms_norm(x, params["final_norm"], config.rms_eps)


# ---------------------------------------------------------------------------------------------------------------- cached


def _extend_linear(
    config: ModelConfig, p: dict[str, Any], x: Float[Array, "B T D"], old: dict[str, Array], num_new: Int[Array, " B"]
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    length, taps = x.shape[1], config.conv_kernel
    window = jnp.concatenate([old["conv"].astype(x.dtype), project("btd,dhe->bthe", x, p["qkv"])], axis=1)
    q, k, v = split_conv(config, jax.nn.silu(conv_window(window, p["conv"])))
    beta, g = gates(p, x)
    active = (num_new > 0)[:, None, None, None]
    if length == 1:
        out, state = step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], g[:, 0], old["state"])
        out = out[:, None]
        conv = jnp.where(active, window[:, 1:].astype(old["conv"].dtype), old["conv"])
    else:
        real = (jnp.arange(length)[None] < num_new[:, None])[:, :, None, None]
        one_segment = jnp.zeros((x.shape[0], length), jnp.int32)
        out, state = chunked(q, k, v, jnp.where(real, beta, 0), jnp.where(real, g, 0), one_segment, old["state"], config.chunk_size)
        newest = num_new[:, None] + jnp.arange(taps - 1)[None]
        conv = jnp.take_along_axis(window, newest[:, :, None, None], axis=1).astype(old["conv"].dtype)
    state = jnp.where(active[..., None], state, old["state"])
    return linear_out(config, p, out, x), {"conv": conv, "state": state}


def _extend_full(
    config: ModelConfig,
    p: dict[str, Any],
    x: Float[Array, "B T D"],
    old: dict[str, Array],
    rotary: tuple[Array, Array],
    start: Int[Array, " B"],
    num_new: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    q, gate, k, v = attention_inputs(config, p, x, *rotary)
    slot, offset = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None]
    # Padding goes beyond the last row of the cache, where writes are dropped.
    column = jnp.where(offset < num_new[:, None], start[:, None] + offset, old["k"].shape[2])
    keys = old["k"].at[slot, :, column].set(k.astype(old["k"].dtype), mode="drop")
    values = old["v"].at[slot, :, column].set(v.astype(old["v"].dtype), mode="drop")
    out = attend_cached(q, keys.astype(x.dtype), values.astype(x.dtype), start)
    return attention_out(p, out, gate), {"k": keys, "v": values}


def extend(
    params: Params, config: ModelConfig, cache: Cache, tokens: Int[Array, "B T"], num_new: Int[Array, " B"]
) -> tuple[Float[Array, "B D"], Cache]:
    """Appends tokens to the slots of a cache.

    Args:
      params: tree of `init_params`.
      config: static. Layers are unrolled here even with config.scan_layers, which then costs a copy of each layer's weights per call.
      cache: a slot may hold at most cache.max_length tokens afterwards: the caller sees to that.
      tokens: right-padded. One column takes the recurrent step, more take the chunked form.
      num_new: how many tokens of each row are real. Slots with 0 stay as they are, bit for bit.

    Returns:
      The hidden state after the final norm at each slot's last new token (undefined for slots with 0), and the new cache.
    """
    positions = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
    rotary = rotation(config, positions)
    x = embed(params, config, tokens)
    layers = {}
    for i in range(config.num_layers):
        p = layer_params(config, params, i)
        h = rms_norm(x, p["attention_norm"], config.rms_eps)
        if config.is_full(i):
            out, layers[str(i)] = _extend_full(config, p["full"], h, cache.layers[str(i)], rotary, cache.length, num_new)
        else:
            out, layers[str(i)] = _extend_linear(config, p["linear"], h, cache.layers[str(i)], num_new)
        x = x + out
        x = x + mlp(p["mlp"], rms_norm(x, p["mlp_norm"], config.rms_eps))
    last = jnp.take_along_axis(x, jnp.maximum(num_new - 1, 0)[:, None, None], axis=1)[:, 0]
    return rms_norm(last, params["final_norm"], config.rms_eps), Cache(cache.length + num_new, layers)


# ---------------------------------------------------------------------------------------------------------------- logits


def logits(params: Params, config: ModelConfig, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """float32 scores over the vocabulary."""
    table = params["embed"] if config.tie_embeddings else params["head"]
    return jnp.einsum("...d,vd->...v", hidden, table.astype(hidden.dtype), precision=precision(hidden.dtype), preferred_element_type=jnp.float32)


def check_row(config: ModelConfig, length: int) -> None:
    """Raises InputError unless rows of `length` tokens can be computed on: what `log_probs` would say, before anything is compiled."""
    pieces.applies(config, length)
    if config.attention == "splash":
        from intraskill.models.qwen35.splash import tile  # as above

        tile(length)


def log_probs(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    index: Int[Array, "R M"],
    targets: Int[Array, "R M"],
    *,
    temperature: float = 1.0,
    banned: Bool[Array, " V"] | None = None,
) -> LogProbs:
    """Log-probs of `targets` given the hidden states at columns `index`, and the entropies there.

    The distribution is softmax(logits / temperature) over the ids that are not banned. Only M hidden states per row meet the vocabulary,
    and only as many at a time as keep the logits small; the backward pass computes them again.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0 for log-probs, got {temperature}")
    hidden = forward(params, config, tokens, positions, segment_ids)
    wanted = jnp.take_along_axis(hidden, index[:, :, None], axis=1).reshape(-1, config.hidden_size)
    flat_targets = targets.reshape(-1)

    def score(hidden: Float[Array, "n D"], targets: Int[Array, " n"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        scores = logits(params, config, hidden) / temperature
        if banned is not None:
            scores = jnp.where(banned[None], MASKED, scores)
        log_total = jax.nn.logsumexp(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, targets[:, None], axis=-1)[:, 0]
        return chosen - log_total, log_total - jnp.sum(jnp.exp(scores - log_total[:, None]) * scores, axis=-1)

    count = wanted.shape[0]
    at_once = max(1, _LOGITS_AT_ONCE // config.vocab_size)
    if count <= at_once:
        logprob, entropy = score(wanted, flat_targets)
    else:
        fill = -count % at_once
        pieces = jnp.pad(wanted, ((0, fill), (0, 0))).reshape(-1, at_once, config.hidden_size)
        pieced_targets = jnp.pad(flat_targets, (0, fill)).reshape(-1, at_once)
        logprob, entropy = lax.map(lambda piece: jax.checkpoint(score)(*piece), (pieces, pieced_targets))
    return LogProbs(logprob.reshape(-1)[:count].reshape(index.shape), entropy.reshape(-1)[:count].reshape(index.shape))
