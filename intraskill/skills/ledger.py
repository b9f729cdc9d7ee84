"""The ledger: what became of every proposal, one JSON line each. For audit and deduplication only; nothing of it ever enters a prompt."""

import dataclasses
import enum
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from intraskill.run_directory import write_text
from intraskill.skills import gate, records
from intraskill.skills.bank import CandidatePool
from intraskill.skills.cards import deployable_of
from intraskill.types import InputError


class Fate(enum.StrEnum):
    """The last thing that happened to a proposal in a round."""

    NO_PROPOSAL = "no_proposal"
    FIREWALL = "rejected_by_firewall"
    DUPLICATE = "duplicate"  # the wording is active, was turned down before, or is another candidate of the round
    STALE = "stale"  # a rewrite of a chunk that is no longer active, or an addition of a family that is
    OVER_LIMIT = "over_limit"  # the round had enough candidates with more support
    CANDIDATE = "candidate"  # went to the gate
    MEASURED = "measured"  # the gate decided; `verdict` says how


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line. `wording` identifies the texts (see `Deployable.digest`)."""

    round: int
    fate: Fate
    cards: tuple[str, ...] = ()
    mechanism: str = ""
    chunk_id: str = ""
    wording: str = ""
    verdict: str = ""
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "fate": str(self.fate), "cards": list(self.cards)}


class Ledger:
    """An append-only file. Questions take a round and look only at earlier ones, so that a resumed round gets the answers it got before."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        if not self.path.exists():
            return []
        found = []
        for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
            try:
                value = records.fields(self.path, json.loads(line), Entry)
                entry = Entry(**{**value, "fate": Fate(value["fate"]), "cards": tuple(value.get("cards", ()))})
                if type(entry.round) is not int or any(type(v) is not str for v in (*entry.cards, *dataclasses.astuple(entry)[3:])):
                    raise TypeError("round is a whole number, all else text")
                found.append(entry)
            except (ValueError, TypeError, RecursionError) as error:
                raise InputError(f"{self.path}:{number}: not a ledger entry ({error}); restore the line or remove it") from error
        return found

    def append(self, entries: Iterable[Entry]) -> None:
        """Adds the entries that are not there yet; a round that is run again after a crash writes nothing twice.

        The file is replaced as a whole, so a crash never leaves half a line; it holds a few dozen lines a round.
        """
        known = self.entries()
        new = [e for e in dict.fromkeys(entries) if e not in set(known)]
        if new:
            lines = [json.dumps(e.to_json(), ensure_ascii=False) for e in (*known, *new)]
            write_text(self.path, "\n".join(lines) + "\n")

    def turned_down(self, before_round: int) -> frozenset[str]:
        """Wordings whose latest gate before `before_round` did not select them."""
        latest = {e.wording: e.verdict for e in self.entries() if e.fate == Fate.MEASURED and e.round < before_round}
        return frozenset(w for w, verdict in latest.items() if verdict != gate.Verdict.SELECTED)

    def last_version(self, logical_id: str, before_round: int) -> int:
        """The highest version of a family that was ever given out before `before_round`, 0 when none was."""
        ids = [e.chunk_id.rpartition("@") for e in self.entries() if e.chunk_id and e.round < before_round]
        return max((int(version) for name, _, version in ids if name == logical_id), default=0)


def measured(pool: CandidatePool, result: gate.GateResult, round_index: int) -> list[Entry]:
    """The entries of a complete gate: every chunk that it measured, active ones included."""
    entries = []
    for decision in result.decisions:
        chunk = pool.chunks[decision.id]
        provenance: Mapping[str, Any] = chunk.provenance
        entries.append(
            Entry(
                round=round_index,
                fate=Fate.MEASURED,
                cards=tuple(provenance.get("cards", ())),
                mechanism=str(provenance.get("mechanism", chunk.logical_id)),
                chunk_id=decision.id,
                wording=deployable_of(chunk).digest,
                verdict=str(decision.verdict),
                detail=f"coefficient {decision.coefficient:+.6f}",
            )
        )
    return entries
