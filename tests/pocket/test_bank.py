"""The committed bank and wordings are what the mechanisms say, and leave the slow loop something to do."""

import json

import jax
import numpy as np
import pytest

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.model import abstract_params
from intraskill.skills.bank import Bank
from intraskill.skills.cards import load_mechanisms
from pocket import build_bank, tokenizer, vocabulary
from pocket.skills import PATH, mechanisms
from shop_env.scripted import PROCEDURES
from shop_env.session import TOOLS


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


def test_the_analyst_can_word_every_useful_mechanism_and_those_that_no_wording_was_taught_for():
    wordings = load_mechanisms(PATH.with_name("mechanisms.json"))
    taught = {name: options for name, options in wordings.items() if name in mechanisms()}
    assert set(wordings) - set(taught) == set(build_bank.UNSEEN)
    assert {mechanisms()[name].shopper for name in taught} == set(PROCEDURES)
    known = set(vocabulary.words())
    for options in wordings.values():
        assert not [word for w in options for word in w.chunk("x", 1, {}).text.split() if word not in known]
    for name, options in taught.items():
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


def test_the_committed_checkpoint_has_this_tokenizer_and_is_small(tmp_path):
    directory = PATH.with_name("checkpoint")
    tokenizer.save(tokenizer.build(vocabulary.words(), TOOLS), tmp_path)
    for file in tmp_path.iterdir():
        assert (directory / file.name).read_bytes() == file.read_bytes(), f"{file.name}: the warm start taught another one"
    config = hf.load_config(directory)
    assert config.vocab_size >= len(vocabulary.words())
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(abstract_params(config))) <= 1_000_000
    assert sum(p.stat().st_size for p in [*directory.iterdir(), PATH.with_name("bank.json")]) <= 8e6
