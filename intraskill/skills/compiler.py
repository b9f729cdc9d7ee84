"""The compiler: many cards in, at most a few candidates out.

Cards about one mechanism are evidence for one candidate, whose texts are the wording that most of them propose. Nothing is invented here: every
candidate's texts are those of a card that passed the firewall.
"""

import dataclasses
from collections.abc import Collection, Sequence

from intraskill.skills import firewall
from intraskill.skills.bank import Bank, Candidate, CandidatePool, Operation
from intraskill.skills.cards import Card, CardStatus, Deployable, deployable_of
from intraskill.skills.ledger import Entry, Fate, Ledger
from intraskill.types import InputError

MAX_CANDIDATES = 6


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One round's pool, and the fate of every card for the ledger."""

    pool: CandidatePool
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class _Proposal:
    """The cards of one mechanism that ask for the same operation on the same family."""

    mechanism: str
    target: str
    cards: tuple[Card, ...]
    wording: Deployable

    @property
    def support(self) -> int:
        return len(self.cards)


def compile_cards(
    cards: Sequence[Card], bank: Bank, ledger: Ledger, *, round_index: int, general: Collection[str], max_candidates: int = MAX_CANDIDATES
) -> Compiled:
    """Merges cards into candidates.

    Args:
      cards: of this round, in any order; the result does not depend on it.
      bank: the active chunks.
      ledger: read, not written: hand the returned entries to `Ledger.append`.
      round_index: of the round; earlier rounds' ledger entries count for deduplication.
      general: the firewall's general vocabulary.
      max_candidates: proposals beyond it are dropped, least support first.
    """
    if max_candidates < 0:
        raise InputError(f"max_candidates = {max_candidates}: needs a number >= 0")
    entries: list[Entry] = []

    def drop(fate: Fate, dropped: Sequence[Card], mechanism: str, wording: str = "", detail: str = "") -> None:
        entries.append(Entry(round_index, fate, tuple(c.id for c in dropped), mechanism, wording=wording, detail=detail))

    clean: list[Card] = []
    for card in sorted(cards, key=lambda c: c.id):
        if card.deployable is None:
            drop(Fate.NO_PROPOSAL, [card], card.mechanism, detail=card.reason)
        elif found := firewall.inspect(card, general):
            drop(Fate.FIREWALL, [card], card.mechanism, card.deployable.digest, "; ".join(found))
        else:
            clean.append(card)

    seen = {deployable_of(c).digest: f"is active as {c.id}" for c in bank.chunks}
    seen |= {w: "was turned down by an earlier gate" for w in ledger.turned_down(round_index) if w not in seen}
    candidates: list[Candidate] = []
    for proposal in _merge(clean):
        digest, logical_id = proposal.wording.digest, proposal.target.rpartition("@")[0] or proposal.mechanism
        active = bank.active(logical_id)
        taken = [c for c in candidates if c.family == logical_id]
        if digest in seen:
            drop(Fate.DUPLICATE, proposal.cards, proposal.mechanism, digest, seen[digest])
        elif (active.id if active else "") != proposal.target:
            drop(
                Fate.STALE,
                proposal.cards,
                proposal.mechanism,
                digest,
                f"target {proposal.target or 'none'}, active {active.id if active else 'none'}",
            )
        elif len(candidates) >= max_candidates:
            drop(Fate.OVER_LIMIT, proposal.cards, proposal.mechanism, digest, f"support {proposal.support}, limit {max_candidates}")
        else:
            known = [ledger.last_version(logical_id, round_index), active.version if active else 0, *(c.chunk.version for c in taken)]
            provenance = {"mechanism": proposal.mechanism, "cards": [c.id for c in proposal.cards], "support": proposal.support, "round": round_index}
            chunk = proposal.wording.chunk(logical_id, max(known) + 1, provenance)
            candidates.append(Candidate(chunk, Operation.REWRITE if active else Operation.ADD))
            seen[digest] = f"is candidate {chunk.id}"
            ids = tuple(c.id for c in proposal.cards)
            entries.append(Entry(round_index, Fate.CANDIDATE, ids, proposal.mechanism, chunk.id, digest, detail=f"support {proposal.support}"))
    return Compiled(CandidatePool(bank, tuple(candidates)), tuple(entries))


def _merge(cards: Sequence[Card]) -> list[_Proposal]:
    """Groups by mechanism and target, most support first; within a group the wording with most cards speaks for all."""
    groups: dict[tuple[str, str], list[Card]] = {}
    for card in cards:
        groups.setdefault((card.mechanism, card.target if card.status == CardStatus.PROPOSE_REWRITE else ""), []).append(card)
    proposals = []
    for (mechanism, target), members in groups.items():
        wordings: dict[str, list[Deployable]] = {}
        for card in members:
            assert card.deployable is not None  # a card without one was dropped above
            wordings.setdefault(card.deployable.digest, []).append(card.deployable)
        chosen = min(wordings, key=lambda digest: (-len(wordings[digest]), digest))
        proposals.append(_Proposal(mechanism, target, tuple(members), wordings[chosen][0]))
    return sorted(proposals, key=lambda p: (-p.support, p.mechanism, p.target))
