"""Slots: extending them in any pieces gives what one forward pass gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny

from intraskill.models.qwen35 import cache

SLOTS, LENGTH = 3, 40
# (new tokens per slot, columns): prefill, single steps, more than a chunk at once, a slot that sits out.
PIECES = [((5, 0, 30), 32), ((1, 1, 1), 1), ((0, 1, 1), 1), ((2, 20, 3), 32), ((1, 0, 0), 1), ((30, 9, 5), 32), ((1, 1, 0), 1)]


@pytest.mark.parametrize("shape", ["plain", "four_values_a_key", "two_full_layers"])
def test_extend_equals_forward(shape):
    config = tiny.config(shape)
    params = tiny.params(config)
    tokens = tiny.tokens(config, SLOTS, LENGTH)
    expected = tiny.forward(params, config, tokens, *tiny.pack([[LENGTH]] * SLOTS, LENGTH))
    slots = cache.init_cache(config, SLOTS, 48)
    for new, columns in PIECES:
        done = np.asarray(slots.length)
        piece = np.full((SLOTS, columns), 7, np.int32)  # what lies beyond the new tokens must not matter
        for slot, count in enumerate(new):
            piece[slot, :count] = tokens[slot, done[slot] : done[slot] + count]
        before = slots
        hidden, slots = tiny.extend(params, config, before, piece, np.asarray(new, np.int32))
        for slot, count in enumerate(new):
            if count:
                np.testing.assert_allclose(hidden[slot], expected[slot, done[slot] + count - 1], atol=3e-5)
            else:
                for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(slots), strict=True):
                    assert np.asarray(a[slot]).tobytes() == np.asarray(b[slot]).tobytes()
    assert slots.length.tolist() == [40, 32, 40]


def test_copied_slots_continue_like_their_source():
    config = tiny.config()
    params = tiny.params(config)
    slots = cache.init_cache(config, SLOTS, 16)
    _, slots = tiny.extend(params, config, slots, tiny.tokens(config, SLOTS, 8), np.asarray([8, 3, 5], np.int32))
    copied = cache.copy_slots(slots, jnp.asarray([0, 0, 1]), jnp.asarray([2, 3, -1]))  # 3 and -1 are no slots: dropped
    assert copied.length.tolist() == [8, 3, 8]
    hidden, _ = tiny.extend(params, config, copied, np.full((SLOTS, 1), 4, np.int32), np.ones(SLOTS, np.int32))
    np.testing.assert_array_equal(hidden[0], hidden[2])
    assert not np.array_equal(hidden[0], hidden[1])


def test_part_of_the_slots_can_be_extended_apart():
    config = tiny.config()
    params = tiny.params(config)
    tokens = tiny.tokens(config, 2, 8)
    slots = cache.init_cache(config, 4, 16)
    chosen = jnp.asarray([3, 1])
    hidden, part = tiny.extend(params, config, cache.gather_slots(slots, chosen), tokens, np.asarray([8, 6], np.int32))
    slots = cache.scatter_slots(slots, part, chosen)
    assert slots.length.tolist() == [0, 6, 0, 8]
    whole, _ = tiny.extend(params, config, cache.init_cache(config, 2, 16), tokens, np.asarray([8, 6], np.int32))
    np.testing.assert_array_equal(hidden, whole)


def test_reset_slots_start_afresh():
    config = tiny.config()
    params = tiny.params(config)
    tokens, new = tiny.tokens(config, SLOTS, 8), np.full(SLOTS, 8, np.int32)
    first, slots = tiny.extend(params, config, cache.init_cache(config, SLOTS, 16), tokens, new)
    slots = cache.reset_slots(slots, jnp.asarray([True, False, True]))
    assert slots.length.tolist() == [0, 8, 0]
    again, _ = tiny.extend(params, config, slots, tokens, new)
    np.testing.assert_array_equal(again[0], first[0])
    np.testing.assert_array_equal(again[2], first[2])
    assert not np.array_equal(again[1], first[1])


def test_members_change_without_recompiling():
    config = tiny.config(hidden_size=16)
    params = tiny.params(config)
    step = jax.jit(lambda p, c, t, n: tiny.extend(p, config, c, t, n), donate_argnums=1)
    slots = cache.init_cache(config, SLOTS, 16)
    for new in ([1, 1, 1], [0, 1, 0], [1, 0, 0]):
        _, slots = step(params, slots, np.ones((SLOTS, 1), np.int32), np.asarray(new, np.int32))
    assert step._cache_size() == 1
    assert slots.length.tolist() == [2, 2, 1]


def test_bytes_of_the_cache():
    """1 full layer: 2 x 2 heads x 16 x 4 B a token; 1 linear layer: 2 heads x 16 x 24 x 4 B of state and 3 x 2 x (2 x 16 + 24) x 4 B of window."""
    slots = cache.init_cache(tiny.config(), 5, 64)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(slots.layers)) == 5 * (64 * 256 + 3072 + 1344)
    assert slots.max_length == 64
