import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intraskill.grpo.advantages import group_advantages


def test_hand_computed():
    # mean 0.5, squared deviations 4 * 0.25 = 1, sample variance 1/3
    got = group_advantages(np.array([1.0, 0.0, 1.0, 0.0]))
    np.testing.assert_allclose(got, np.array([1, -1, 1, -1]) * 0.5 / (3**-0.5 + 1e-6), rtol=1e-12)


def test_without_std_only_centres():
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0.0, 0.5]), divide_by_std=False), [0.5, -0.5, 0.0], atol=1e-15)


@pytest.mark.parametrize("rewards", [[0.3], [0.1] * 8, [0.0, 0.0], [1 / 3] * 7])
def test_equal_rewards_give_exact_zeros(rewards):
    assert not group_advantages(np.array(rewards)).any()
    assert not group_advantages(np.array(rewards), divide_by_std=False).any()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16), st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order(rewards, divide_by_std):
    got = group_advantages(np.array(rewards), divide_by_std=divide_by_std)
    assert abs(got.sum()) < 1e-7 * max(1.0, np.abs(got).max())
    assert np.all(np.diff(got[np.argsort(rewards, kind="stable")]) >= 0)


@pytest.mark.parametrize("rewards", [[], [np.nan, 0.5]])
def test_bad_rewards_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards must be"):
        group_advantages(np.array(rewards))
