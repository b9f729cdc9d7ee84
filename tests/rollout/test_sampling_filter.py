import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.groups import group

from intraskill.grpo.sampling_filter import TechnicalFailures, admit, is_uniform

MIXED, UNIFORM, TECHNICAL = (0.0, 1.0), (0.5, 0.5), (1.0, None)


def build(kinds):
    return [group(i, *kind) for i, kind in enumerate(kinds)]


def indices(groups):
    return [g.index for g in groups]


def test_uniform_groups_are_dropped_while_enough_remain():
    admission = admit(build([UNIFORM, MIXED, UNIFORM, MIXED, UNIFORM]), 3, 9)
    # five submitted, three wanted: two may go, and the first two uniform ones do
    assert indices(admission.admitted) == [1, 3, 4] and indices(admission.uniform) == [0, 2] and admission.missing == 0
    assert admission.metrics() == {
        "groups_admitted": 3,
        "groups_admitted_uniform": 1,
        "groups_dropped_technical": 0,
        "groups_dropped_uniform": 2,
        "groups_surplus": 0,
    }


def test_informative_groups_beyond_the_step_are_surplus():
    admission = admit(build([MIXED, UNIFORM, MIXED, MIXED, UNIFORM]), 2, 9)
    assert indices(admission.admitted) == [0, 2] and indices(admission.surplus) == [3] and indices(admission.uniform) == [1, 4]


def test_technical_groups_use_up_the_reserve_before_new_ones_are_asked_for():
    admission = admit(build([TECHNICAL, UNIFORM, MIXED]), 2, 9)
    assert indices(admission.admitted) == [1, 2] and indices(admission.technical) == [0] and admission.missing == 0
    admission = admit(build([TECHNICAL, UNIFORM, TECHNICAL]), 2, 9)
    assert indices(admission.admitted) == [1] and admission.missing == 1


def test_failures_in_a_row_stop_the_run():
    kinds = [MIXED, TECHNICAL, TECHNICAL, MIXED, TECHNICAL]
    admit(build(kinds), 2, 3)
    with pytest.raises(TechnicalFailures, match=r"groups 4 to 6 .*3 in a row.*engine gone.*resume"):
        admit(build([*kinds, TECHNICAL, TECHNICAL]), 2, 3)


def test_uniform_compares_exactly():
    assert is_uniform(group(0, 0.1 + 0.2, 0.1 + 0.2)) and not is_uniform(group(0, 0.1 + 0.2, 0.3))


def test_the_same_index_twice_is_a_bug():
    with pytest.raises(ValueError, match="same index"):
        admit([group(1, *MIXED), group(1, *MIXED)], 1, 3)


@given(kinds=st.lists(st.sampled_from([MIXED, UNIFORM, TECHNICAL]), max_size=12), wanted=st.integers(1, 8), order=st.randoms())
def test_properties(kinds: list, wanted: int, order: random.Random):
    groups = build(kinds)
    admission = admit(groups, wanted, 99)
    scored, mixed = sum(k != TECHNICAL for k in kinds), kinds.count(MIXED)
    assert len(admission.admitted) == min(wanted, scored) and admission.missing == wanted - len(admission.admitted)
    # as many informative groups as there are, and uniform ones only to fill up
    assert sum(not is_uniform(g) for g in admission.admitted) == min(mixed, wanted)
    parts = [*admission.admitted, *admission.technical, *admission.uniform, *admission.surplus]
    assert sorted(indices(parts)) == list(range(len(kinds)))
    assert all(indices(p) == sorted(indices(p)) for p in (admission.admitted, admission.technical, admission.uniform, admission.surplus))
    shuffled = list(groups)
    order.shuffle(shuffled)
    assert admit(shuffled, wanted, 99) == admission
