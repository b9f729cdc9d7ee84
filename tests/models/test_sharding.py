"""Loss and gradients on meshes of 8 virtual devices equal those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from models import tiny

from intraskill.models.qwen35 import model, sharding
from intraskill.models.qwen35.params import logical_axes
from intraskill.types import InputError

if len(jax.devices()) < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

ROWS, WIDTH = 8, 24
SIZES = {
    "num_heads": 8,
    "num_kv_heads": 8,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@functools.cache
def on_one_device(scan_layers):
    config = tiny.config("three_values_a_key", scan_layers=scan_layers, **SIZES)
    params = tiny.params(config)
    rows = (tiny.tokens(config, ROWS, WIDTH), *tiny.pack([[10, 9]] * ROWS, WIDTH))
    return config, params, rows, jax.jit(functools.partial(loss_and_grads, config))(params, rows)


def loss_and_grads(config, params, rows):
    tokens, positions, segments = rows
    index = jnp.broadcast_to(jnp.arange(WIDTH - 1)[None], (ROWS, WIDTH - 1))

    def loss(params):
        return -jnp.mean(model.log_probs(params, config, tokens, positions, segments, index, tokens[:, 1:]).logprob)

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize(("mesh", "scan_layers"), [((1, 8, 1), False), ((1, 1, 8), False), ((2, 2, 2), True)])
def test_loss_and_gradients(mesh, scan_layers):
    config, params, rows, (loss, grads) = on_one_device(scan_layers)
    mesh = sharding.make_mesh(*mesh)
    shardings = sharding.param_shardings(config, mesh)
    row_sharding = NamedSharding(mesh, sharding.ROWS)
    step = jax.jit(
        functools.partial(loss_and_grads, config),
        in_shardings=(shardings, row_sharding),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), shardings),
    )
    sharded_loss, sharded_grads = step(jax.device_put(params, shardings), jax.device_put(rows, row_sharding))
    np.testing.assert_allclose(sharded_loss, loss, atol=1e-5)
    for a, b in zip(jax.tree.leaves(sharded_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_heads_of_linear_layers_stay_whole():
    """Cut in 2, each device holds 4 of 8 key heads with query, key and values; and no device a whole matrix."""
    config, _, _, _ = on_one_device(False)
    mesh = sharding.make_mesh(1, 4, 2)
    shardings = sharding.param_shardings(config, mesh)
    shapes = model.abstract_params(config)
    qkv = shardings["layers"]["0"]["linear"]["qkv"].shard_shape(shapes["layers"]["0"]["linear"]["qkv"].shape)
    assert qkv == (32 // 4, 8 // 2, 2 * 8 + 2 * 8)
    for leaf, where in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
        if leaf.ndim > 1 and leaf.size > 100 and leaf.shape[0] != config.conv_kernel:
            assert np.prod(where.shard_shape(leaf.shape)) * 8 == leaf.size


def test_every_parameter_has_one_axis_per_dimension():
    for scan_layers in (False, True):
        config = tiny.config("two_full_layers", scan_layers=scan_layers)
        axes = jax.tree.leaves(logical_axes(config), is_leaf=lambda x: isinstance(x, tuple))
        assert [len(a) for a in axes] == [leaf.ndim for leaf in jax.tree.leaves(model.abstract_params(config))]


def test_one_device_is_a_mesh_too():
    config = tiny.config()
    shardings = sharding.param_shardings(config, sharding.make_mesh(devices=jax.devices()[:1]))
    assert all(s.is_fully_replicated for s in jax.tree.leaves(shardings))


def test_misfits_are_named():
    with pytest.raises(InputError, match="needs 6 devices, there are 8"):
        sharding.make_mesh(1, 3, 2)
    with pytest.raises(InputError, match="tensor=8 does not divide heads=2"):
        sharding.param_shardings(tiny.config(), sharding.make_mesh(1, 1, 8))


def test_more_blocks_make_no_larger_program():
    """Scanned, 8 blocks lower to the program of 2 but for their number; unrolled they would take four times as many products."""

    def num_products(num_layers, scan_layers):
        config = tiny.config("two_full_layers", num_layers=num_layers, scan_layers=scan_layers)
        ids = jax.ShapeDtypeStruct((2, WIDTH), jnp.int32)
        gradient = jax.grad(lambda p, *b: jnp.sum(model.log_probs(p, config, *b).logprob))
        return jax.jit(gradient).lower(model.abstract_params(config), *[ids] * 5).as_text().count("stablehlo.dot_general")

    assert num_products(16, True) == num_products(4, True)
    assert num_products(8, False) > 1.5 * num_products(4, False)
