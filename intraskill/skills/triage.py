"""The failure frontier: which groups the model cannot solve at all, and whether the bank's guidance would have been enough.

A group in which every episode was scored and none succeeded is retried once with the whole bank. The retry diagnoses; it never trains.
"""

import dataclasses
import enum
from collections.abc import Iterable

from intraskill.types import Group, Trajectory, require


class Triage(enum.StrEnum):
    """What became of a group."""

    LEARNABLE = "learnable"  # some episode succeeded
    TECHNICAL = "technical"  # an episode, or the retry, was not scored: no conclusion
    RETRY = "retry"  # all wrong; to be retried with the full bank
    INTERNALISED_DEFICIT = "internalised_deficit"  # the retry succeeded: the bank knows it, the model does not yet
    PENDING_ANALYSIS = "pending_analysis"  # the retry failed too: something for the analyst


@dataclasses.dataclass(frozen=True)
class Case:
    """A group with its verdict and, where one ran, its retry."""

    group: Group
    triage: Triage
    retry: Trajectory | None = None


def triage(group: Group) -> Case:
    """The verdict before any retry."""
    if not group.scored:
        return Case(group, Triage.TECHNICAL)
    return Case(group, Triage.RETRY if group.all_wrong else Triage.LEARNABLE)


def after_retry(case: Case, retry: Trajectory) -> Case:
    """The verdict once the one full-bank retry of an all-wrong group has ended."""
    require(case.triage == Triage.RETRY, f"group {case.group.index} is {case.triage}, only a group to retry can take a retry")
    if not retry.scored:
        return Case(case.group, Triage.TECHNICAL, retry)
    return Case(case.group, Triage.INTERNALISED_DEFICIT if retry.success else Triage.PENDING_ANALYSIS, retry)


def counts(cases: Iterable[Case]) -> dict[str, int]:
    """How many groups met each fate, every fate listed."""
    found = [c.triage for c in cases]
    return {str(t): found.count(t) for t in Triage}
