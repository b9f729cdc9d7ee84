"""Log-probs on a mesh: one device's values and gradients, and no buffer of the vocabulary's size anywhere."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from models import tiny

from intraskill.models.qwen35 import fsdp, model, sharding
from intraskill.models.qwen35.attention import attend_packed
from intraskill.models.qwen35.splash import attend_splash, tile, tiles_computed
from intraskill.types import InputError

if len(jax.devices()) < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

ROWS, WIDTH, TRAINED = 8, 64, 40
HEADS = {
    "num_heads": 8,
    "num_kv_heads": 8,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def loss_and_grads(score, config, params):
    """A loss that mixes log-probs and entropies of episodes of 30, 3 and 20 tokens; banned ids are not among the targets that count."""
    tokens = jnp.asarray(tiny.tokens(config, ROWS, WIDTH))
    positions, segments = map(jnp.asarray, tiny.pack([[30, 3, 20]] * ROWS, WIDTH))
    index = jnp.broadcast_to(jnp.arange(3, 3 + TRAINED)[None], (ROWS, TRAINED))
    targets = tokens[:, 4 : 4 + TRAINED]
    banned = np.zeros(config.vocab_size, bool)
    banned[[5, 7, 60]] = True
    weight = np.random.default_rng(0).normal(size=(ROWS, TRAINED)).astype(np.float32)

    def loss(params):
        out = score(params, config, tokens, positions, segments, index, targets, temperature=0.7, banned=jnp.asarray(banned))
        return jnp.sum(jnp.where(jnp.asarray(banned)[targets], 0, weight * out.logprob)) + 0.3 * jnp.sum(weight * out.entropy)

    return jax.jit(jax.value_and_grad(loss))(params)


def assert_same(ours, expected):
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(np.max(np.abs(b))))


@pytest.mark.parametrize(
    ("shape", "mesh", "settings"),
    [
        ("plain", (1, 8, 1), {"remat": "layer"}),
        ("plain", (1, 1, 8), {}),
        ("two_full_layers", (2, 2, 2), {"piece_length": 16, "tie_embeddings": False}),
    ],
)
def test_a_mesh_gives_what_one_device_gives(monkeypatch, shape, mesh, settings):
    monkeypatch.setattr(fsdp, "_LOGITS_AT_ONCE", TRAINED * 20)  # several slices of the vocabulary of 80
    config = tiny.config(shape, **HEADS, **settings)
    params = tiny.params(config)
    expected = loss_and_grads(model.log_probs, dataclasses.replace(config, remat="none", piece_length=0), params)
    mesh = sharding.make_mesh(*mesh)

    def score(*args, **kwargs):
        return fsdp.log_probs(*args, mesh=mesh, **kwargs)

    assert_same(loss_and_grads(score, config, jax.device_put(params, sharding.param_shardings(config, mesh))), expected)


def largest_buffers(config, mesh, score):
    """Entries of the arrays in the compiled gradient of one device, largest first."""
    rows = NamedSharding(mesh, sharding.ROWS)

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    def loss(params, *batch):
        return jnp.sum(score(params, config, *batch).logprob)

    shardings = sharding.param_shardings(config, mesh)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.abstract_params(config), shardings)
    batch = [of(jnp.int32, 8, 256)] * 3 + [of(jnp.int32, 8, 128)] * 2
    compiled = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, *batch).compile()
    sizes = (math.prod(int(n) for n in dims.split(",") if n) for dims in re.findall(r"[a-z]\d+\[([\d,]*)\]", compiled.as_text()))
    return max(sizes)


def test_no_buffer_holds_the_vocabulary_matrix_or_all_logits(monkeypatch):
    """A device's 128 trained tokens x 3,840 ids are 491,520 entries and the matrix 122,880: nothing comes near. The usual way has both."""
    monkeypatch.setattr(fsdp, "_LOGITS_AT_ONCE", 128 * 256)
    config = tiny.config("two_full_layers", vocab_size=3840, num_kv_heads=4, remat="layer", piece_length=64)
    mesh = sharding.make_mesh(1, 8, 1)
    assert largest_buffers(config, mesh, lambda *args: fsdp.log_probs(*args, mesh=mesh)) < config.vocab_size * config.hidden_size
    assert largest_buffers(config, mesh, model.log_probs) >= config.vocab_size * config.hidden_size


@pytest.mark.parametrize(("vocabulary", "tokens", "expected"), [(248_320, 12_288, 3880), (80, 10, 80), (97, 1 << 26, 1), (97, 1 << 20, 1)])
def test_slices_divide_the_vocabulary(vocabulary, tokens, expected):
    """2^26 entries allow 5,461 rows for 12,288 tokens; the largest divisor of 248,320 = 2^9 x 5 x 97 up to there is 5 x 97 x 8."""
    assert fsdp.slice_rows(vocabulary, tokens) == expected


@pytest.mark.parametrize("settings", [{"piece_length": 16}, {"remat": "layer"}, {"piece_length": 32, "remat": "layer", "conv_kernel": 1}])
def test_pieces_and_remat_change_nothing(settings):
    config = tiny.config("two_full_layers", **settings)
    params = tiny.params(config)
    expected = loss_and_grads(model.log_probs, dataclasses.replace(config, remat="none", piece_length=0), params)
    assert_same(loss_and_grads(model.log_probs, config, params), expected)


def test_rows_that_pieces_do_not_fill_are_refused():
    config = tiny.config(piece_length=48)
    with pytest.raises(InputError, match="a row of 64 tokens is no multiple of model piece_length, 48"):
        loss_and_grads(model.log_probs, config, tiny.params(config))


@pytest.mark.loose_numerics  # the kernel that JAX ships promotes dtypes
def test_the_kernel_attends_like_the_blocked_path():
    """Nine tiles of 128, three of them skipped, episodes that end inside tiles; values and gradients, by the kernel's interpreter."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 384, heads, 128)).astype(np.float32) for heads in (4, 2, 2))
    weight = rng.normal(size=q.shape).astype(np.float32)
    segments = jnp.asarray(tiny.pack([[100, 150, 100]], 384)[1])
    real = (segments > 0)[..., None, None]

    def loss(attend, q, k, v):
        return jnp.sum(jnp.where(real, weight * attend(q, k, v, segments), 0))

    ours = jax.grad(lambda *args: loss(lambda *a: attend_splash(*a, interpret=True), *args), (0, 1, 2))(q, k, v)
    expected = jax.grad(lambda *args: loss(attend_packed, *args), (0, 1, 2))(q, k, v)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * float(np.max(np.abs(b))))


def test_tiles():
    assert [tile(n) for n in (24_576, 1536, 256, 640)] == [1024, 512, 256, 128]
    assert tiles_computed(384) == 6  # 3 x 3 tiles, the upper triangle left out
    with pytest.raises(InputError, match="a row of 100 tokens is no multiple of 128"):
        tile(100)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"attention": "splash"}, "attention is 'splash' with dtype float32"), ({"piece_length": 24}, "piece_length is 24: it must be a multiple of")],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        tiny.config(**settings)
