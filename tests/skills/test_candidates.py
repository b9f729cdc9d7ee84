import dataclasses
import itertools
import random

import pytest

from intraskill.skills import firewall, gate, pairing, triage, words
from intraskill.skills.assignment import assign
from intraskill.skills.bank import Bank, CandidatePool, Operation
from intraskill.skills.cards import Card, CardStatus, Deployable, Secrets
from intraskill.skills.compiler import compile_cards
from intraskill.skills.ledger import Entry, Fate, Ledger, measured
from intraskill.types import Completion, Group, InputError, Mask, MaskKind, Status, Task, Trajectory, Turn

GENERAL = firewall.vocabulary(["search for every required attribute before you buy a product with the right option and go back if the page lacks it"])
TEXTS = [Deployable("right option", "a product lacks it", f"go back {w}") for w in ("before you buy", "and search", "if it lacks every option")]


def card(name: str, mechanism: str, wording=TEXTS[0], target: str = "", **kwargs) -> Card:
    status = CardStatus.PROPOSE_REWRITE if target else CardStatus.PROPOSE_ADD
    return Card(name, status, "", mechanism, wording, target, privileged={"trial": {"success": True}}, **kwargs)


# ------------------------------------------------------------------------------------------------------------------ words


def test_phrases_are_matched_at_word_boundaries():
    assert not words.says("a zippered coat", "red") and words.says("in colour RED under 30", "red") and words.says("red", "red")
    assert words.says("红色外套", "红") and words.says("ＸＬ size", "xl") and not words.says("xxl", "xl") and not words.says("anything", "")
    assert words.says("hooded jacket", "hooded  Jacket") and words.says("zippered, red", "red")
    assert words.tokens("Red防水外套 (XL)") == ["red", "防水", "水外", "外套", "xl"]


# --------------------------------------------------------------------------------------------------------------- firewall

SECRETS = Secrets(("task-77",), ("p3", "100012345678"), ("orion waterproof hooded jacket", "mug"), ("crimson", "size 42"))
PUBLIC = ["find a waterproof hooded jacket", "has waterproof hooded padded", "A orion waterproof hooded jacket $22"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("search for task-77", "task id"),
        ("buy P3", "product id"),
        ("buy 100012345678 before you go", "product id"),
        ("search for a waterproof hooded jacket", "'waterproof hooded jacket' of the product title"),
        ("buy the orion waterproof hooded jacket", "product title"),
        ("buy a mug", "product title 'mug'"),
        ("go for crimson", "hidden value 'crimson'"),
        ("the right option: Size 42", "hidden value"),
        ("search for padded velvet", "could not see: velvet"),
        ("go back 3", "could not see: 3"),
    ],
)
def test_the_firewall_rejects(text, message):
    found = firewall.violations([text], secrets=SECRETS, public=PUBLIC, general=GENERAL)
    assert any(message in f for f in found), found


@pytest.mark.parametrize(
    "text", ["search for every required attribute", "Go back if the page lacks PADDED", "search for hooded before waterproof", ""]
)
def test_the_firewall_lets_pass(text):
    assert firewall.violations([text], secrets=SECRETS, public=PUBLIC, general=GENERAL) == ()


def test_chinese_texts_are_held_to_the_same_rule():
    public, secrets = ["找一件防水外套"], Secrets(titles=("猎户座防水连帽外套",), values=("深红",))
    assert firewall.violations(["防水外套"], secrets=secrets, public=public, general=()) == ()
    assert firewall.violations(["选深红"], secrets=secrets, public=public, general=("选深", "深红")) == ("contains the hidden value '深红'",)
    assert firewall.violations(["防水连帽"], secrets=secrets, public=public, general=())


# ----------------------------------------------------------------------------------------------------------------- triage


def trajectory(success: bool, status=Status.PURCHASE) -> Trajectory:
    turn = Turn(0, Completion((1,), (0.0,), "stop", (0,), 0, 0.0), "", None, "", "", "")
    return Trajectory((1,), (True,), (0.0,), (turn,), status, float(success), success)


def test_triage_follows_the_group():
    task, mask = Task("t", "find", {}), Mask(MaskKind.SKILL_FREE)
    right, wrong, broken = trajectory(True), trajectory(False), trajectory(False, Status.TECHNICAL)
    group = {
        n: Group(i, task, mask, t) for i, (n, t) in enumerate({"some": (wrong, right), "none": (wrong, wrong), "broken": (wrong, broken)}.items())
    }
    assert triage.triage(group["some"]).triage == "learnable" and triage.triage(group["broken"]).triage == "technical"
    case = triage.triage(group["none"])
    assert case.triage == "retry"
    after = [triage.after_retry(case, t) for t in (right, wrong, broken)]
    assert [c.triage for c in after] == ["internalised_deficit", "pending_analysis", "technical"]
    assert triage.counts(after) == {"learnable": 0, "technical": 1, "retry": 0, "internalised_deficit": 1, "pending_analysis": 1}
    with pytest.raises(ValueError, match="only a group to retry"):
        triage.after_retry(after[0], wrong)


def test_cards_keep_their_invariants():
    with pytest.raises(ValueError, match="trial that succeeded"):
        Card("a", CardStatus.PROPOSE_ADD, "", "m", TEXTS[0])
    with pytest.raises(ValueError, match="gives a reason"):
        Card("a", CardStatus.NO_PROPOSAL)
    with pytest.raises(ValueError, match="only a rewrite"):
        card("a", "m", target="x@1").__class__("a", CardStatus.PROPOSE_REWRITE, "", "m", TEXTS[0])


# --------------------------------------------------------------------------------------------------------------- compiler


def test_cards_of_a_mechanism_become_one_candidate_by_support(tmp_path):
    cards = [card("c1", "a"), card("c2", "b", TEXTS[1]), card("c3", "b", TEXTS[1]), card("c4", "b", TEXTS[2])]
    found = compile_cards(cards, Bank(), Ledger(tmp_path / "l"), round_index=0, general=GENERAL)
    b, a = found.pool.candidates
    assert (b.chunk.id, b.operation, b.chunk.procedure) == ("b@1", Operation.ADD, TEXTS[1].procedure)
    assert b.chunk.provenance == {"mechanism": "b", "cards": ["c2", "c3", "c4"], "support": 3, "round": 0}
    assert a.chunk.id == "a@1"
    assert [(e.fate, e.chunk_id, e.cards) for e in found.entries] == [(Fate.CANDIDATE, "b@1", ("c2", "c3", "c4")), (Fate.CANDIDATE, "a@1", ("c1",))]


def test_the_result_does_not_depend_on_card_order(tmp_path):
    cards = [card(f"c{i}", m, w) for i, (m, w) in enumerate(itertools.product("abc", TEXTS))]
    results = []
    for seed in range(5):
        random.Random(seed).shuffle(cards)
        results.append(compile_cards(cards, Bank(), Ledger(tmp_path / "l"), round_index=0, general=GENERAL))
    assert all(r == results[0] for r in results)


def test_limits_and_fates(tmp_path):
    distinct = [Deployable(f"option {a}", "", f"go {b}") for a, b in itertools.product(("before", "back", "if", "lacks"), ("back", "search"))]
    cards = [card(f"c{i}", f"m{i}", w) for i, w in enumerate(distinct)]
    cards += [card("x1", "secret", Deployable("buy", "", "buy velvet")), Card("x2", CardStatus.NO_PROPOSAL, "no rule")]
    cards += [card("x3", "again", distinct[0])]
    found = compile_cards(cards, Bank(), Ledger(tmp_path / "l"), round_index=2, general=GENERAL)
    assert len(found.pool.candidates) == 6
    fates = {c: e.fate for e in found.entries for c in e.cards}
    assert fates["x1"] == Fate.FIREWALL and fates["x2"] == Fate.NO_PROPOSAL
    assert sorted(fates) == sorted(c.id for c in cards)  # every card's fate is on record
    assert list(fates.values()).count(Fate.OVER_LIMIT) == 2 and list(fates.values()).count(Fate.DUPLICATE) == 1
    with pytest.raises(InputError):
        compile_cards([], Bank(), Ledger(tmp_path / "l"), round_index=0, general=GENERAL, max_candidates=-1)


def test_rewrites_keep_the_family_and_never_reuse_a_version(tmp_path):
    bank = Bank((TEXTS[0].chunk("fam", 2, {}),))
    ledger = Ledger(tmp_path / "l")
    ledger.append([Entry(0, Fate.CANDIDATE, chunk_id="fam@5"), Entry(3, Fate.CANDIDATE, chunk_id="fam@9")])
    cards = [
        card("c1", "m", TEXTS[1], "fam@2"),
        card("c2", "n", TEXTS[2], "fam@2"),
        card("c3", "o", TEXTS[0], "fam@2"),
        card("c4", "p", Deployable("buy", "", "go back"), "fam@1"),
        card("c5", "fam", Deployable("buy", "", "search")),
    ]
    found = compile_cards(cards, bank, ledger, round_index=3, general=GENERAL)
    assert [(c.chunk.id, c.operation) for c in found.pool.candidates] == [("fam@6", Operation.REWRITE), ("fam@7", Operation.REWRITE)]
    fates = {c: e.fate for e in found.entries for c in e.cards}
    assert fates["c3"] == Fate.DUPLICATE and fates["c4"] == fates["c5"] == Fate.STALE


def test_wordings_that_a_gate_turned_down_are_not_tried_again(tmp_path):
    """A whole round: compile, gate, ledger, compile again."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    cards = [card("c1", "good"), card("c2", "bad", TEXTS[1])]
    first = compile_cards(cards, Bank(), ledger, round_index=0, general=GENERAL)
    plan = assign(first.pool, seed=0, split="validation", task_ids=[f"t{i}" for i in range(20)])
    identity = pairing.Identity("w", "s", "p", "e")
    bare = [pairing.Observed(a.task_id, 0, (), {"reward": 0.5}, identity) for a in plan.assignments]
    gain = {"good@1": 0.25, "bad@1": -0.25}
    masked = [pairing.Observed(a.task_id, 0, a.chunk_ids, {"reward": 0.5 + sum(gain[i] for i in a.chunk_ids)}, identity) for a in plan.assignments]
    result = gate.run(plan, bare, masked, identity, draws=20)
    assert result.selected == ("good@1",)
    bank = gate.next_bank(first.pool, result, round_index=0)
    ledger.append([*first.entries, *measured(first.pool, result, 0)])

    second = compile_cards(cards, bank, ledger, round_index=1, general=GENERAL)
    assert second.pool.candidates == ()
    assert [(e.cards, e.fate, e.detail) for e in second.entries] == [
        (("c2",), Fate.DUPLICATE, "was turned down by an earlier gate"),
        (("c1",), Fate.DUPLICATE, "is active as good@1"),
    ]
    # A resumed round 0 sees what it saw before: its own entries do not count.
    assert compile_cards(cards, Bank(), ledger, round_index=0, general=GENERAL) == first


def test_the_ledger_appends_once_and_names_a_broken_line(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger.entries() == [] and ledger.turned_down(5) == frozenset() and ledger.last_version("x", 5) == 0
    one, two = Entry(0, Fate.CANDIDATE, ("c",), "m", "m@1", "d"), Entry(0, Fate.MEASURED, ("c",), "m", "m@1", "d", "non_positive")
    ledger.append([one]), ledger.append([one, two]), ledger.append([two])
    assert ledger.entries() == [one, two]
    assert ledger.turned_down(1) == {"d"} and ledger.turned_down(0) == frozenset()
    ledger.append([dataclasses.replace(two, round=1, verdict="selected")])
    assert ledger.turned_down(2) == frozenset()  # the latest gate decides
    with open(ledger.path, "a") as file:
        file.write("{\n")
    with pytest.raises(InputError, match="ledger.jsonl:4"):
        ledger.entries()


def test_an_empty_pool_is_a_pool():
    assert CandidatePool(Bank()).chunks == {}
