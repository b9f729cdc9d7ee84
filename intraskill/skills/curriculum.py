"""The curriculum: how often each active chunk appears in training prompts, frozen for one round.

A group's mask is a pure function of (curriculum hash, group index). The run's seed is inside the hash, so two seeds differ in their masks, and a
worker that holds another file cannot silently train under other masks: it refuses the file or computes a different hash.

Treatments are plain parameters: q = 1 is plain GRPO; q = 0 with rho_min = rho_max = 1 is the whole bank in every prompt, no mask;
`withdraw_over` = n lets every rho fall linearly to zero over the first n groups of the run; `mixed` gives every episode of a group a mask of its
own; `retrieve` = k shows the k chunks that are nearest to the task instead of drawing.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from typing import Any

from intraskill.skills import draws, records
from intraskill.skills.bank import Bank
from intraskill.types import InputError, Mask, MaskKind, require


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """One round's inclusion probabilities.

    Attributes:
      bank_sha256: the bank that the ids come from.
      seed: the run's seed; part of the hash, hence of every mask.
      q: probability of a skill-free group.
      chunk_ids: the bank's chunks in its order, which is the prompt's order.
      rho: inclusion probability of each chunk, given that the group is assisted.
      contributions: what the gate measured for each chunk, None when nothing was measured yet.
      scale: the contribution that maps to the largest rho; None when no contribution is positive and none was configured.
      withdraw_over: groups over which rho falls linearly to zero; 0: constant.
      retrieve: how many chunks `retrieval.nearest` picks for a group that is not skill-free, in place of the draws with rho; 0: draws.
      mixed: a mask for each episode. This breaks the within-context comparison: a group's advantages then compare episodes that saw different
        guidance. Here for comparison with methods that do so.
    """

    bank_sha256: str
    seed: int
    q: float
    chunk_ids: tuple[str, ...]
    rho: tuple[float, ...]
    contributions: tuple[float | None, ...]
    scale: float | None
    withdraw_over: int = 0
    retrieve: int = 0
    mixed: bool = False

    def __post_init__(self):
        require(0 <= self.q <= 1, f"q = {self.q}: the probability of a skill-free group lies in [0, 1]")
        sizes = (len(self.chunk_ids), len(self.rho), len(self.contributions))
        require(len(set(sizes)) == 1, f"chunk_ids, rho and contributions differ in length: {sizes}")
        require(all(0 <= r <= 1 for r in self.rho), f"rho = {self.rho}: inclusion probabilities lie in [0, 1]")
        require(len(set(self.chunk_ids)) == len(self.chunk_ids), f"duplicate chunk in {self.chunk_ids}")
        require(self.withdraw_over >= 0, f"withdraw_over = {self.withdraw_over}: expected a number of groups, 0 for never")
        require(self.retrieve >= 0, f"retrieve = {self.retrieve}: expected a number of chunks, 0 for none")
        require(
            not self.retrieve or not (self.withdraw_over or self.mixed),
            f"retrieve = {self.retrieve} with withdraw_over = {self.withdraw_over}, mixed = {self.mixed}: what is retrieved is not drawn; choose one",
        )

    @property
    def record(self) -> records.Record:
        content = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items() if k != "bank_sha256"}
        # Treatments are named where they are used; without one the content, hence every mask, is that of the published curriculum.
        unused = {k for k in ("retrieve", "mixed") if not content[k]}
        return records.Record("curriculum", {k: v for k, v in content.items() if k not in unused}, {"bank": self.bank_sha256})

    @functools.cached_property
    def sha256(self) -> str:
        return self.record.sha256

    def save(self, path: str | os.PathLike) -> str:
        """Writes the curriculum atomically and returns its sha256."""
        return records.write(path, self.record)

    @staticmethod
    def load(path: str | os.PathLike, bank: Bank | None = None) -> "Curriculum":
        """Reads a curriculum; refuses an edited file, and one made for another bank than `bank`."""
        record = records.read(path, "curriculum")
        source = record.inputs.get("bank", "")
        if bank is not None and source != bank.sha256:
            raise InputError(f"{path}: was made for bank {source[:12]}, not {bank.sha256[:12]}; give the bank of its own round")
        found = records.fields(path, dict(record.content), Curriculum, bank_sha256=source)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
        try:
            return Curriculum(**values)
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: {error}; repair it, then {records.REHASH} {path}") from error


def build(
    bank: Bank,
    contributions: Mapping[str, float],
    *,
    seed: int,
    q: float,
    rho_min: float,
    rho_max: float,
    rho_unmeasured: float,
    scale: float | None = None,
    withdraw_over: int = 0,
    retrieve: int = 0,
    mixed: bool = False,
) -> Curriculum:
    """The curriculum of one round from what the last gate measured.

    A positive contribution c gets rho_min + (rho_max - rho_min) * min(c / scale, 1); anything else that was measured gets rho_min.

    Args:
      bank: the active chunks.
      contributions: chunk id -> measured contribution; a chunk without an entry gets `rho_unmeasured`.
      seed: the run's seed.
      q: probability of a skill-free group.
      rho_min: probability of a chunk that contributes nothing.
      rho_max: probability of a chunk that contributes `scale`.
      rho_unmeasured: probability of a chunk that no gate has measured (the initial bank).
      scale: the contribution that earns rho_max; None: the largest positive one in this bank.
      withdraw_over: see `Curriculum`.
      retrieve: see `Curriculum`.
      mixed: see `Curriculum`.
    """
    if not 0 <= rho_min <= rho_max <= 1:
        raise InputError(f"rho_min = {rho_min}, rho_max = {rho_max}: need 0 <= rho_min <= rho_max <= 1")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise InputError(f"scale = {scale}: needs a positive number, or None for the largest contribution")
    measured = tuple(contributions.get(i) for i in bank.ids)
    positive = [c for c in measured if c is not None and c > 0]
    scale = scale if scale is not None else max(positive, default=None)

    def rho(contribution: float | None) -> float:
        if contribution is None:
            return rho_unmeasured
        share = min(contribution / scale, 1.0) if scale is not None and contribution > 0 else 0.0
        # This spelling returns the end points themselves for shares 0 and 1, without rounding.
        return rho_min * (1 - share) + rho_max * share

    try:
        return Curriculum(bank.sha256, seed, q, bank.ids, tuple(map(rho, measured)), measured, scale, withdraw_over, retrieve, mixed)
    except ValueError as error:
        raise InputError(str(error)) from error


def mask(curriculum: Curriculum, group_index: int, *, episode: int | None = None, retrieved: tuple[str, ...] | None = None) -> Mask:
    """The chunks that every prompt of group `group_index` carries.

    Each draw is keyed by the curriculum's hash, the group and the chunk's own id, so it does not depend on which other chunks or groups exist.

    Args:
      curriculum: of the group's round.
      group_index: in the run's stream of groups.
      episode: which of the group's episodes, exactly when the curriculum is mixed.
      retrieved: the ids that `retrieval.nearest` found for the group's task, exactly when the curriculum retrieves.
    """
    require(
        (episode is not None) == curriculum.mixed, f"group {group_index}, episode {episode}: a mixed curriculum has masks of episodes, no other has"
    )
    require((retrieved is not None) == bool(curriculum.retrieve), f"group {group_index}: retrieved chunks belong to a curriculum that retrieves")
    key = (curriculum.sha256, group_index) if episode is None else (curriculum.sha256, group_index, "episode", episode)
    if draws.uniform(*key, "skill_free") < curriculum.q:
        return Mask(MaskKind.SKILL_FREE)
    if retrieved is not None:
        return Mask(MaskKind.RETRIEVED, retrieved)
    remaining = max(0.0, 1 - group_index / curriculum.withdraw_over) if curriculum.withdraw_over else 1.0
    pairs = zip(curriculum.chunk_ids, curriculum.rho, strict=True)
    return Mask(MaskKind.ASSISTED, tuple(i for i, rho in pairs if draws.uniform(*key, "chunk", i) < rho * remaining))
