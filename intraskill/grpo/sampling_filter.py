"""Dynamic sampling: which of the submitted groups a training step admits.

A step submits more groups than it needs. Groups with a technical failure are never admitted. A group whose rewards are all equal carries no
gradient and is passed over as long as enough other submitted groups remain to fill the step; when they do not, it is kept, so one wave of
submissions fills the step unless technical failures are many. Only then is a further wave needed, of exactly `missing` groups.

The decision is a pure function of the groups, taken in the order of their index: which of them finished first has no influence. Dropped
groups stay in the statistics of everything generated; only the trainer does not see them.
"""

import dataclasses
from collections.abc import Sequence

from intraskill.types import Group, InputError, require


class TechnicalFailures(InputError):
    """So many groups in a row failed technically that the engine or the shop must be looked at."""


@dataclasses.dataclass(frozen=True)
class Admission:
    """What a step does with the groups submitted for it. The four tuples are disjoint, each in the order of the index."""

    admitted: tuple[Group, ...]
    technical: tuple[Group, ...]  # dropped: an episode was not scored
    uniform: tuple[Group, ...]  # dropped: all rewards equal
    surplus: tuple[Group, ...]  # informative, but the step was full
    missing: int  # groups still to submit before the step is full

    def metrics(self) -> dict[str, int]:
        """Counts for the step's line in metrics.jsonl."""
        return {
            "groups_admitted": len(self.admitted),
            "groups_admitted_uniform": sum(is_uniform(g) for g in self.admitted),
            "groups_dropped_technical": len(self.technical),
            "groups_dropped_uniform": len(self.uniform),
            "groups_surplus": len(self.surplus),
        }


def is_uniform(group: Group) -> bool:
    """Whether all rewards are equal, compared exactly: equal outcomes are computed by the same arithmetic."""
    return len(set(group.rewards.tolist())) == 1


def admit(groups: Sequence[Group], groups_per_step: int, max_technical: int) -> Admission:
    """Chooses the groups of one training step.

    Args:
      groups: every group submitted for the step so far, in any order.
      groups_per_step: how many the step trains on.
      max_technical: this many technical failures in a row (by index) raise.

    Returns:
      The decision. With `missing` > 0 submit that many further groups and decide again over all of them.

    Raises:
      TechnicalFailures: naming the last failure's own words.
    """
    require(groups_per_step >= 1 and max_technical >= 1, f"groups_per_step and max_technical must be >= 1, got {groups_per_step}, {max_technical}")
    groups = sorted(groups, key=lambda g: g.index)
    require(len({g.index for g in groups}) == len(groups), "two submitted groups have the same index")
    _refuse_outage(groups, max_technical)
    scored = [g for g in groups if g.scored]
    spare = len(scored) - groups_per_step  # how many scored groups may still be passed over
    admitted, uniform, surplus = [], [], []
    for group in scored:
        if len(admitted) == groups_per_step:
            (uniform if is_uniform(group) else surplus).append(group)
        elif is_uniform(group) and spare > 0:
            spare -= 1
            uniform.append(group)
        else:
            admitted.append(group)
    technical = [g for g in groups if not g.scored]
    return Admission(tuple(admitted), tuple(technical), tuple(uniform), tuple(surplus), max(0, -spare))


def _refuse_outage(groups: Sequence[Group], max_technical: int) -> None:
    """Raises once `max_technical` consecutive groups are technical."""
    row: list[Group] = []
    for group in groups:
        row = [] if group.scored else [*row, group]
        if len(row) == max_technical:
            error = next(t.error for t in group.trajectories if not t.scored)
            raise TechnicalFailures(
                f"groups {row[0].index} to {row[-1].index} all failed technically ({max_technical} in a row is the limit), the last with: {error}; "
                "look at the engine's and the shop's logs, then resume the run"
            )
