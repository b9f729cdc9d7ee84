"""A row worked on in pieces gives what the row gives at once, and adds its gradients up without losing small ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from intraskill.models.qwen35 import model, pieces
from intraskill.models.qwen35.config import QWEN35_4B
from intraskill.types import InputError


def body(w, carried, x, shift):
    """Each token adds to a running sum, which the next one sees."""
    outs = []
    for t in range(x.shape[1]):
        carried = jnp.tanh(x[:, t] @ w + carried + shift)
        outs.append(carried)
    return carried, jnp.stack(outs, axis=1)


def start(x):
    return jnp.full((x.shape[0], x.shape[2]), 0.5)


def doubled(p):
    return p * 2


def assert_same_gradients(f, g, *args):
    found, expected = (jax.value_and_grad(lambda *args, f=f: jnp.sum(jnp.arange(48.0).reshape(2, 6, 4) * f(*args)), (0, 1))(*args) for f in (f, g))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_pieces_give_value_and_gradients_of_the_whole_row(length):
    p, x = jax.random.normal(jax.random.key(0), (4, 4)), jax.random.normal(jax.random.key(1), (2, 6, 4))
    work, shift = pieces.Work(length, body, start, doubled), jnp.full(6 // length, 0.1)
    assert_same_gradients(lambda p, x: pieces.once(work, p, x, shift), lambda p, x: body(2 * p, start(x), x, 0.1)[1], p, x)


def test_layers_in_pieces_give_value_and_gradients_of_layers_in_turn():
    p, x = list(jax.random.normal(jax.random.key(0), (3, 4, 4))), jax.random.normal(jax.random.key(1), (2, 6, 4))
    work = pieces.Work(2, body, start, doubled)

    def in_turn(p, x):
        for one in p:
            x = body(2 * one, start(x), x, 0.1)[1]
        return x

    assert_same_gradients(lambda p, x: pieces.layers(work, p, x, jnp.full(3, 0.1)), in_turn, p, x)


def test_gradients_of_bfloat16_matrices_are_added_up_in_float32():
    """Pieces contribute 1, 1, 1, 1, 256: bfloat16 has a step of 2 at 256, so that last to first it would stay there."""
    work = pieces.Work(1, lambda w, carried, x, _: (carried, w * x), lambda x: (), lambda w: w)
    x = jnp.asarray([[1, 1, 1, 1, 256]], jnp.bfloat16)
    assert jax.grad(lambda w: jnp.sum(pieces.once(work, w, x, ()).astype(jnp.float32)))(jnp.ones((), jnp.bfloat16)) == 260


def test_cut_and_join_are_inverse():
    x = jnp.arange(24).reshape(2, 6, 2)
    assert pieces.cut(3, x).shape == (2, 2, 3, 2) and (pieces.cut(3, x)[1, 0] == x[0, 3:]).all()
    assert (pieces.join(pieces.cut(3, x)) == x).all()


@pytest.mark.parametrize(
    ("changes", "length", "words"),
    [
        ({"piece_length": 2048}, 24576 + 1024, "25600 tokens is no multiple of model piece_length, 2048"),
        ({"attention": "splash", "dtype": "bfloat16"}, 24576 + 64, "24640 tokens is no multiple of 128"),
    ],
)
def test_rows_that_cannot_be_computed_on_are_refused_by_their_length(changes, length, words):
    config = dataclasses.replace(QWEN35_4B, **changes)
    for fits in (1024, 2048, 24576):
        model.check_row(config, fits)
    with pytest.raises(InputError, match=words):
        model.check_row(config, length)
