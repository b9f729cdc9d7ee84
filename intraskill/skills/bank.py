"""The bank: the ordered active chunks, and the candidates that want to join or replace them.

The bank's order is the prompt's order, everywhere. A chunk's identity over rewrites is its logical id, which is also its *family*: at most one
version of a family is active, and no prompt ever carries two.
"""

import dataclasses
import enum
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from intraskill.skills import records
from intraskill.types import Chunk, InputError, Mask, MaskKind, require

MAX_ACTIVE = 10


@dataclasses.dataclass(frozen=True)
class Bank:
    """Active chunks in prompt order; empty is a legal bank.

    Invariants: at most MAX_ACTIVE chunks, no two of one family.
    """

    chunks: tuple[Chunk, ...] = ()
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        families = [c.logical_id for c in self.chunks]
        require(len(families) <= MAX_ACTIVE, f"{len(families)} active chunks; a bank holds at most {MAX_ACTIVE}: remove some")
        require(len(set(families)) == len(families), f"two active versions of one logical id in {families}: keep one")

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(c.id for c in self.chunks)

    @property
    def record(self) -> records.Record:
        return records.Record("bank", {"chunks": [encode_chunk(c) for c in self.chunks]}, self.inputs)

    @functools.cached_property
    def sha256(self) -> str:
        return self.record.sha256

    @property
    def full_mask(self) -> Mask:
        """The mask of retries and full-skill evaluations."""
        return Mask(MaskKind.FULL, self.ids)

    def active(self, logical_id: str) -> Chunk | None:
        """The active chunk of a family."""
        return next((c for c in self.chunks if c.logical_id == logical_id), None)

    def save(self, path: str | os.PathLike) -> str:
        """Writes the bank atomically and returns its sha256."""
        return records.write(path, self.record)

    @staticmethod
    def load(path: str | os.PathLike) -> "Bank":
        """Reads a bank, refusing one whose content does not match its hash."""
        return bank_of(path, records.read(path, "bank"))


class Operation(enum.StrEnum):
    """What a candidate wants. There is no delete: the gate retires."""

    ADD = "ADD"
    REWRITE = "REWRITE"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A chunk that the gate shall measure: a new family, or another version of an active one."""

    chunk: Chunk
    operation: Operation

    @property
    def family(self) -> str:
        """The logical id: a rewrite competes with the active chunk that shares it, and keeps it when it wins."""
        return self.chunk.logical_id


@dataclasses.dataclass(frozen=True)
class CandidatePool:
    """One round's candidates for one bank.

    Invariants: a REWRITE names an active family and has a higher version than the active chunk; an ADD opens a family that neither the bank nor
    another candidate has; ids are unique.
    """

    bank: Bank
    candidates: tuple[Candidate, ...] = ()
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        ids = [c.chunk.id for c in self.candidates]
        added = [c.family for c in self.candidates if c.operation == Operation.ADD]
        require(len(set(ids)) == len(ids), f"duplicate candidate in {ids}")
        require(len(set(added)) == len(added), f"two ADD candidates of one family in {added}: merge them")
        for candidate in self.candidates:
            active = self.bank.active(candidate.family)
            if candidate.operation == Operation.ADD:
                require(active is None, f"ADD {candidate.chunk.id}: the bank already has this family; propose a REWRITE")
            else:
                require(active is not None, f"REWRITE {candidate.chunk.id}: the bank has no active {candidate.family!r}; name an active chunk")
                require(
                    active is None or candidate.chunk.version > active.version, f"REWRITE {candidate.chunk.id}: needs a version above the active one"
                )

    @property
    def record(self) -> records.Record:
        content = {"candidates": [{"operation": str(c.operation), "chunk": encode_chunk(c.chunk)} for c in self.candidates]}
        return records.Record("candidates", content, {**self.inputs, "bank": self.bank.sha256})

    @property
    def chunks(self) -> Mapping[str, Chunk]:
        """Every chunk that a validation prompt of this round may carry, by id."""
        return {c.id: c for c in (*self.bank.chunks, *(c.chunk for c in self.candidates))}

    def save(self, path: str | os.PathLike) -> str:
        """Writes the pool atomically and returns its sha256."""
        return records.write(path, self.record)

    @staticmethod
    def load(path: str | os.PathLike, bank: Bank) -> "CandidatePool":
        """Reads a pool, refusing an edited file and a pool that was made for another bank."""
        record = records.read(path, "candidates")
        if record.inputs.get("bank") != bank.sha256:
            raise InputError(
                f"{path}: was made for bank {record.inputs.get('bank', '?')[:12]}, not {bank.sha256[:12]}; give the bank of its own round"
            )
        try:
            items = [records.fields(path, c, Candidate) for c in record.content["candidates"]]
            candidates = tuple(Candidate(decode_chunk(path, c["chunk"]), Operation(c["operation"])) for c in items)
            return CandidatePool(bank, candidates, {k: v for k, v in record.inputs.items() if k != "bank"})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: {error}") from error


def adopt(pool: CandidatePool, max_active: int) -> Bank:
    """The next bank of a run without a gate: every candidate is taken on trust, in the pool's order.

    A rewrite takes its family's place, of two rewrites the one that stands first; additions go to the end while fewer than `max_active` chunks are
    active. Nothing retires.
    """
    chunks = list(pool.bank.chunks)
    replaced: set[str] = set()
    for candidate in pool.candidates:
        place = next((i for i, c in enumerate(chunks) if c.logical_id == candidate.family), None)
        if place is not None and candidate.family not in replaced:
            chunks[place] = candidate.chunk
        elif place is None and len(chunks) < max_active:
            chunks.append(candidate.chunk)
        replaced.add(candidate.family)
    return Bank(tuple(chunks), {"bank": pool.bank.sha256, "candidates": pool.record.sha256}) if pool.candidates else pool.bank


def encode_chunk(chunk: Chunk) -> dict[str, Any]:
    """A chunk as JSON values."""
    value = dataclasses.asdict(chunk)
    return {**value, "provenance": dict(value["provenance"]), "history": [dict(h) for h in value["history"]]}


def decode_chunk(path: str | os.PathLike, value: Any) -> Chunk:
    """A chunk from JSON values that came from `path`."""
    found = records.fields(path, value, Chunk)
    text = {k: v for k, v in found.items() if k not in ("version", "provenance", "history")}
    wrong = sorted(k for k, v in text.items() if not isinstance(v, str))
    if (
        wrong
        or type(found["version"]) is not int
        or not isinstance(found.get("provenance", {}), dict)
        or not isinstance(found.get("history", []), list)
        or not all(isinstance(measured, dict) for measured in found.get("history", []))
    ):
        raise InputError(
            f"{path}: chunk {found['logical_id']!r}: {wrong or 'version, provenance or history'} of the wrong type; text fields are strings"
        )
    return Chunk(**{**found, "history": tuple(found.get("history", ()))})


def bank_of(path: str | os.PathLike, record: records.Record) -> Bank:
    """The bank in a record that was read from `path`."""
    try:
        return Bank(tuple(decode_chunk(path, c) for c in record.content["chunks"]), record.inputs)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error


def markdown(chunks: Sequence[Chunk]) -> str:
    """The chunks for people: one section each, with what past gates measured."""
    sections = []
    for chunk in chunks:
        lines = [f"## {chunk.title} (`{chunk.id}`)", ""]
        named = (
            ("Applies when", chunk.applies_when),
            ("Procedure", chunk.procedure),
            ("Check", chunk.check),
            ("Common failure", chunk.common_failure),
        )
        lines += [f"- **{name}:** {text}" for name, text in named if text]
        if chunk.history:
            lines += ["", "| " + " | ".join(chunk.history[-1]) + " |", "|" + "---|" * len(chunk.history[-1])]
            lines += ["| " + " | ".join(_cell(h.get(k, "")) for k in chunk.history[-1]) + " |" for h in chunk.history]
        sections.append("\n".join(lines) + "\n")
    return "\n".join([f"# Skill bank: {len(chunks)} active\n", *sections])


def diff(before: Sequence[Chunk], after: Sequence[Chunk]) -> list[str]:
    """What changed between two banks, one line a change; contribution history is left out, it always grows."""
    lines = []
    old, new = ({c.logical_id: c for c in chunks} for chunks in (before, after))
    lines += [f"- {old[k].id} {old[k].title}" for k in old if k not in new]
    lines += [f"+ {new[k].id} {new[k].title}" for k in new if k not in old]
    for key in (k for k in new if k in old):
        if old[key].id != new[key].id:
            lines.append(f"~ {old[key].id} -> {new[key].id}")
        for field in ("title", "applies_when", "procedure", "check", "common_failure"):
            a, b = getattr(old[key], field), getattr(new[key], field)
            lines += [f"  {new[key].id} {field}: {a!r} -> {b!r}"] if a != b else []
    kept = [[k for k in x if k in old and k in new] for x in (old, new)]
    lines += [f"order: {', '.join(kept[0])} -> {', '.join(kept[1])}"] if kept[0] != kept[1] else []
    return lines


def _cell(value: Any) -> str:
    return f"{value:+.4f}" if isinstance(value, float) else str(value)
