import dataclasses
import json

import pytest

from intraskill.skills import records
from intraskill.skills.__main__ import main
from intraskill.skills.bank import Bank, Candidate, CandidatePool, Operation, diff, markdown
from intraskill.types import Chunk, InputError, MaskKind


def chunk(name: str, version: int = 1, **kwargs) -> Chunk:
    return Chunk(name, version, title=f"{name} title", applies_when="a page opens", procedure=f"do {name}", **kwargs)


def test_a_bank_survives_the_disk_with_its_hash(tmp_path):
    bank = Bank((chunk("b", history=({"round": 0, "coefficient": 0.25},)), chunk("a", 3, provenance={"source": "seed"})), {"gate": "f" * 64})
    sha256 = bank.save(tmp_path / "bank.json")
    again = Bank.load(tmp_path / "bank.json")
    assert again == bank and again.sha256 == sha256 == bank.sha256
    assert again.ids == ("b@1", "a@3")
    assert again.full_mask.kind == MaskKind.FULL and again.full_mask.chunk_ids == again.ids
    assert [p.name for p in tmp_path.iterdir()] == ["bank.json"]  # no temporary file stays behind


def test_the_hash_covers_order_texts_and_inputs():
    a, b = chunk("a"), chunk("b")
    variants = [Bank((a, b)), Bank((b, a)), Bank((a,)), Bank((a, b), {"gate": "0"}), Bank((dataclasses.replace(a, check="x"), b))]
    assert len({v.sha256 for v in variants}) == len(variants)


def test_an_edited_file_is_refused_until_it_is_rehashed(tmp_path, capsys):
    path = tmp_path / "bank.json"
    Bank((chunk("a"),)).save(path)
    reformatted = json.dumps(json.loads(path.read_text()))
    path.write_text(reformatted)  # spacing is no edit
    Bank.load(path)
    path.write_text(reformatted.replace("do a", "do a twice"))
    with pytest.raises(InputError, match=r"python -m intraskill\.skills rehash .*bank\.json"):
        Bank.load(path)
    assert main(["verify", str(path)]) == 2
    assert main(["rehash", str(path)]) == 0 and main(["verify", str(path)]) == 0
    assert Bank.load(path).chunks[0].procedure == "do a twice"
    assert "rehash" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(schema_version=99), "schema_version 99"),
        (lambda r: r.update(schema="gate"), "expected 'bank'"),
        (lambda r: r.update(extra=1), "unknown keys"),
        (lambda r: r["content"]["chunks"][0].update(colour="red"), "unknown fields"),
        (lambda r: r["content"]["chunks"][0].pop("title"), "lacks"),
        (lambda r: r["content"]["chunks"][0].update(procedure=" "), "may not be empty"),
        (lambda r: r["content"]["chunks"][0].update(version="1"), "wrong type"),
        (lambda r: r["content"]["chunks"][0].update(history=[1]), "wrong type"),
        (lambda r: r["content"].update(chunks=r["content"]["chunks"] * 2), "two active versions"),
        (lambda r: r["content"].pop("chunks"), "chunks"),
    ],
)
def test_broken_files_are_named_and_refused(tmp_path, change, message):
    path = tmp_path / "bank.json"
    Bank((chunk("a"),)).save(path)
    raw = json.loads(path.read_text())
    change(raw)
    if raw["schema"] == "bank" and raw["schema_version"] == 1:
        raw["sha256"] = records.Record("bank", raw["content"], raw["inputs"]).sha256
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=message):
        Bank.load(path)


def test_a_bank_is_bounded_and_never_holds_two_versions():
    Bank(tuple(chunk(f"c{i}") for i in range(10)))
    with pytest.raises(ValueError, match="at most 10"):
        Bank(tuple(chunk(f"c{i}") for i in range(11)))
    with pytest.raises(ValueError, match="two active versions"):
        Bank((chunk("a"), chunk("a", 2)))


def test_candidates_are_checked_against_their_bank(tmp_path):
    bank = Bank((chunk("a", 2),))
    pool = CandidatePool(bank, (Candidate(chunk("a", 3), Operation.REWRITE), Candidate(chunk("n"), Operation.ADD)), {"ledger": "1" * 64})
    pool.save(tmp_path / "candidates.json")
    assert CandidatePool.load(tmp_path / "candidates.json", bank) == pool
    assert list(pool.chunks) == ["a@2", "a@3", "n@1"]
    with pytest.raises(InputError, match="was made for bank"):
        CandidatePool.load(tmp_path / "candidates.json", Bank())
    for candidate, message in [
        (Candidate(chunk("a", 3), Operation.ADD), "already has this family"),
        (Candidate(chunk("z"), Operation.REWRITE), "no active 'z'"),
        (Candidate(chunk("a", 2), Operation.REWRITE), "version above"),
    ]:
        with pytest.raises(ValueError, match=message):
            CandidatePool(bank, (candidate,))


def test_views_for_people(tmp_path, capsys):
    old = Bank((chunk("a", history=({"round": 0, "coefficient": 0.125},)), chunk("b"), chunk("c")))
    new = Bank((chunk("c"), dataclasses.replace(chunk("a", 2), procedure="do it well"), chunk("d")))
    text = markdown(old.chunks)
    assert "## a title (`a@1`)" in text and "- **Procedure:** do a" in text and "| 0 | +0.1250 |" in text
    assert diff(old.chunks, new.chunks) == [
        "- b@1 b title",
        "+ d@1 d title",
        "~ a@1 -> a@2",
        "  a@2 procedure: 'do a' -> 'do it well'",
        "order: a, c -> c, a",
    ]
    assert diff(old.chunks, old.chunks) == []
    old.save(tmp_path / "old.json"), new.save(tmp_path / "new.json")
    assert main(["show", str(tmp_path / "old.json")]) == 0 and capsys.readouterr().out == text
    assert main(["diff", str(tmp_path / "old.json"), str(tmp_path / "new.json")]) == 1
    assert main(["diff", str(tmp_path / "old.json"), str(tmp_path / "old.json")]) == 0


def test_verify_follows_the_links_between_files(tmp_path, capsys):
    bank = Bank((chunk("a"),))
    pool = CandidatePool(bank, (Candidate(chunk("n"), Operation.ADD),))
    bank.save(tmp_path / "bank.json"), pool.save(tmp_path / "candidates.json"), Bank().save(tmp_path / "other.json")
    assert main(["verify", str(tmp_path / "bank.json"), str(tmp_path / "candidates.json")]) == 0
    assert main(["verify", str(tmp_path / "other.json"), str(tmp_path / "candidates.json")]) == 1
    assert "NOT among the given files" in capsys.readouterr().out


def test_unreadable_files_are_input_errors(tmp_path):
    (tmp_path / "x.json").write_text("{")
    for name in ("x.json", "absent.json"):
        with pytest.raises(InputError, match=name):
            Bank.load(tmp_path / name)
