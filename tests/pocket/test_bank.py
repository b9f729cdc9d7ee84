"""The committed bank and wordings are what the mechanisms say, and leave the slow loop something to do."""

import json

import pytest

from intraskill.skills.bank import Bank
from intraskill.skills.cards import load_mechanisms
from pocket import build_bank
from pocket.skills import PATH, mechanisms
from shop_env.scripted import PROCEDURES


@pytest.mark.parametrize("name", ["bank.json", "mechanisms.json"])
def test_the_committed_file_is_what_build_bank_writes(tmp_path, monkeypatch, name):
    monkeypatch.setattr(build_bank, "HERE", tmp_path)
    build_bank.main()
    assert (tmp_path / name).read_bytes() == PATH.with_name(name).read_bytes()


def test_the_initial_bank_has_useful_chunks_a_stale_one_and_a_placebo_and_lacks_useful_ones():
    bank = Bank.load(PATH.with_name("bank.json"))
    drives = [mechanisms()[chunk.logical_id].shopper for chunk in bank.chunks]
    assert drives.count("skip_first") == 1 and drives.count(None) == 1
    useful = {d for d in drives if d in PROCEDURES}
    assert len(useful) == len(drives) - 2 >= 2
    assert len(set(PROCEDURES) - useful) >= 2


def test_the_analyst_has_the_known_wordings_of_every_useful_mechanism_and_new_ones_for_no_purchase():
    wordings = load_mechanisms(PATH.with_name("mechanisms.json"))
    assert "no_purchase" not in mechanisms() and wordings.pop("no_purchase")
    assert {mechanisms()[name].shopper for name in wordings} == set(PROCEDURES)
    for name, options in wordings.items():
        texts = [(w.title, w.applies_when, w.procedure) for w in options]
        assert texts == [(c.title, c.applies_when, c.procedure) for c in mechanisms()[name].paraphrases]


def test_each_procedure_has_one_mechanism_with_distinct_wordings():
    assert sorted(m.shopper for m in mechanisms().values() if m.shopper in PROCEDURES) == sorted(PROCEDURES)
    flags = {name: entry for name, entry in json.loads(PATH.read_text())["mechanisms"].items()}
    for name, mechanism in mechanisms().items():
        texts = [c.text for c in (*mechanism.paraphrases, *mechanism.held_out)]
        assert len(set(texts)) == len(texts) and len(mechanism.paraphrases) >= 3 and mechanism.held_out
        assert flags[name].get("placebo", False) == (mechanism.shopper is None)
        assert flags[name].get("stale", False) == (mechanism.shopper == "skip_first")
