import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intraskill.skills import curriculum
from intraskill.skills.bank import Bank
from intraskill.types import Chunk, InputError, Mask, MaskKind

BANK = Bank(tuple(Chunk(name, 1, title=name, applies_when="", procedure=f"do {name}") for name in "dacb"))
DEFAULTS = {"seed": 7, "q": 0.2, "rho_min": 0.2, "rho_max": 0.9, "rho_unmeasured": 0.5}


def build(contributions=None, bank=BANK, **changes):
    return curriculum.build(bank, contributions or {}, **{**DEFAULTS, **changes})


def test_positive_contributions_map_linearly_onto_rho():
    built = build({"d@1": 0.04, "a@1": 0.01, "c@1": -0.3, "gone@2": 9.0})
    assert built.scale == 0.04
    # 0.2 + 0.7 * (1, 1/4), a negative one at the floor, an unmeasured one at its default
    np.testing.assert_allclose(built.rho, [0.9, 0.375, 0.2, 0.5], atol=1e-15)
    assert built.rho[0] == 0.9
    assert built.contributions == (0.04, 0.01, -0.3, None)


def test_a_configured_scale_is_kept_and_clips():
    built = build({"d@1": 0.04, "a@1": 0.01}, scale=0.02)
    np.testing.assert_allclose(built.rho, [0.9, 0.55, 0.5, 0.5], atol=1e-15)


def test_without_a_positive_contribution_there_is_no_scale():
    built = build({i: 0.0 for i in BANK.ids})
    assert built.scale is None and built.rho == (0.2,) * 4


@pytest.mark.parametrize("bad", [{"rho_min": 0.95}, {"scale": 0.0}, {"scale": math.inf}, {"q": 1.5}, {"rho_unmeasured": 2.0}, {"rho_max": 1.5}])
def test_bad_parameters_are_input_errors(bad):
    with pytest.raises(InputError):
        build(**bad)


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_rho_is_monotone_and_bounded(values):
    built = build(dict(zip(BANK.ids, values, strict=True)))
    assert all(0.2 <= r <= 0.9 for r in built.rho)
    order = np.argsort(values)
    assert all(built.rho[a] <= built.rho[b] for a, b in zip(order, order[1:], strict=False))


def test_masks_are_pure_and_do_not_depend_on_order():
    built = build()
    forwards = [curriculum.mask(built, i) for i in range(60)]
    again = build()
    backwards = [curriculum.mask(again, i) for i in reversed(range(60))]
    assert forwards == backwards[::-1]


def test_frequencies_match_q_and_rho():
    built = build({"d@1": 0.04, "a@1": 0.01, "c@1": -0.3})
    num = 3000
    masks = [curriculum.mask(built, i) for i in range(num)]
    assisted = [m for m in masks if m.kind == MaskKind.ASSISTED]
    # Bounds are five standard deviations of a binomial share.
    assert abs(1 - len(assisted) / num - 0.2) < 5 * math.sqrt(0.2 * 0.8 / num)
    included = np.array([[i in m.chunk_ids for i in BANK.ids] for m in assisted], float)
    for share, rho in zip(included.mean(0), built.rho, strict=True):
        assert abs(share - rho) < 5 * math.sqrt(rho * (1 - rho) / len(assisted))
    correlation = np.corrcoef(included.T) - np.eye(4)
    assert np.abs(correlation).max() < 5 / math.sqrt(len(assisted))
    serial = np.corrcoef(included[:-1, 0], included[1:, 0])[0, 1]
    assert abs(serial) < 5 / math.sqrt(len(assisted))


def test_prompt_order_is_bank_order_and_empty_is_not_skill_free():
    masks = [curriculum.mask(build(rho_unmeasured=0.3), i) for i in range(200)]
    for m in masks:
        assert list(m.chunk_ids) == [i for i in BANK.ids if i in m.chunk_ids]
    assert Mask(MaskKind.ASSISTED) in masks and Mask(MaskKind.SKILL_FREE) in masks


def test_treatments():
    assert {curriculum.mask(build(q=1.0), i) for i in range(50)} == {Mask(MaskKind.SKILL_FREE)}
    whole = build({"a@1": -1.0}, q=0.0, rho_min=1.0, rho_max=1.0, rho_unmeasured=1.0)
    assert {curriculum.mask(whole, i) for i in range(50)} == {Mask(MaskKind.ASSISTED, BANK.ids)}
    assert {curriculum.mask(build(bank=Bank(), q=0.0), i) for i in range(50)} == {Mask(MaskKind.ASSISTED)}


def test_treatments_change_the_hash_only_where_they_are_used(tmp_path):
    """A curriculum without one has the content, hence the masks, that it had before there were any."""
    plain = build()
    assert set(plain.record.content) == {"seed", "q", "chunk_ids", "rho", "contributions", "scale", "withdraw_over"}
    for changes in ({"mixed": True}, {"retrieve": 2}, {"withdraw_over": 9}):
        other = build(**changes)
        assert other.sha256 != plain.sha256
        other.save(tmp_path / "c.json")
        assert curriculum.Curriculum.load(tmp_path / "c.json", BANK) == other


def test_mixed_masks_are_pure_in_group_and_episode():
    mixed = build(mixed=True)
    drawn = {(g, e): curriculum.mask(mixed, g, episode=e) for g in range(40) for e in range(4)}
    assert all(curriculum.mask(build(mixed=True), g, episode=e) == drawn[g, e] for g, e in reversed(list(drawn)))
    assert sum(len({drawn[g, e] for e in range(4)}) > 1 for g in range(40)) > 30
    share = np.mean([m.kind == MaskKind.SKILL_FREE for m in drawn.values()])
    assert abs(share - 0.2) < 5 * math.sqrt(0.2 * 0.8 / len(drawn))


def test_what_a_treatment_needs_must_be_given_and_nothing_else():
    for built, arguments in [(build(), {"episode": 0}), (build(), {"retrieved": ()}), (build(mixed=True), {}), (build(retrieve=1), {})]:
        with pytest.raises(ValueError, match="group 3"):
            curriculum.mask(built, 3, **arguments)
    retrieving = build(retrieve=1, q=0.5)
    masks = {curriculum.mask(retrieving, i, retrieved=("a@1",)) for i in range(50)}
    assert masks == {Mask(MaskKind.SKILL_FREE), Mask(MaskKind.RETRIEVED, ("a@1",))}
    for bad in ({"retrieve": 1, "mixed": True}, {"retrieve": 1, "withdraw_over": 5}, {"retrieve": -1}):
        with pytest.raises(InputError, match="retrieve"):
            build(**bad)


def test_withdrawal_falls_linearly_to_nothing():
    built = build(q=0.0, rho_unmeasured=1.0, withdraw_over=1000)
    sizes = np.array([len(curriculum.mask(built, i).chunk_ids) / 4 for i in range(1200)])
    assert sizes[0] == 1.0 and not sizes[1000:].any()
    np.testing.assert_allclose([sizes[a : a + 200].mean() for a in (0, 400, 800)], [0.9, 0.5, 0.1], atol=5 * 0.5 / math.sqrt(800))


def test_seed_bank_and_parameters_all_change_the_masks():
    base = build()
    others = [build(seed=8), build(q=0.21), build(bank=Bank(BANK.chunks, {"gate": "1"})), build(scale=1.0)]
    stream = [curriculum.mask(base, i) for i in range(64)]
    for other in others:
        assert other.sha256 != base.sha256
        assert [curriculum.mask(other, i) for i in range(64)] != stream


def test_chunks_are_drawn_by_their_own_id(monkeypatch):
    """With the hash held fixed, neither the other chunks nor their probabilities move a chunk's draw, and a larger rho only adds groups."""
    monkeypatch.setattr(curriculum.Curriculum, "sha256", "fixed")
    base = build(q=0.0)
    alone = build(q=0.0, bank=Bank((BANK.chunks[1],)))
    raised = dataclasses.replace(base, rho=(0.0, 0.8, 1.0, 0.1))
    held = [["a@1" in curriculum.mask(x, i).chunk_ids for i in range(300)] for x in (base, alone, raised)]
    assert held[0] == held[1] != held[2]
    assert all(b for a, b in zip(held[0], held[2], strict=True) if a)


def test_files(tmp_path):
    built = build({"d@1": 0.04})
    path = tmp_path / "curriculum.json"
    assert built.save(path) == built.sha256
    assert curriculum.Curriculum.load(path, BANK) == built
    with pytest.raises(InputError, match="was made for bank"):
        curriculum.Curriculum.load(path, Bank())
    raw = json.loads(path.read_text())
    raw["content"]["q"] = 0.9
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match="was edited"):
        curriculum.Curriculum.load(path)
