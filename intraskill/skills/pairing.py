"""Pairs bare and masked validation episodes under a contract: same task and sample, verified checkpoint, sampling, prompt and shop; assigned mask.

Whatever breaks the contract is named, never dropped in silence.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float

from intraskill.skills.assignment import Column, Plan


@dataclasses.dataclass(frozen=True)
class Identity:
    """What must be equal for two episodes to be comparable: hashes that were verified, not names that someone typed."""

    weights: str  # digest of the published weights that the engine confirmed
    sampling: str
    prompt: str  # digest of the prompt's fixed parts and of the chunk texts
    environment: str


@dataclasses.dataclass(frozen=True)
class Observed:
    """One validation episode as the gate sees it; `injected` is what the prompt really carried."""

    task_id: str
    sample: int
    injected: tuple[str, ...]
    outcomes: Mapping[str, float]  # "reward", "success" and the reward's components
    identity: Identity
    scored: bool = True


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Differences of paired episodes, one row a pair."""

    columns: tuple[Column, ...]
    tasks: tuple[str, ...]
    samples: tuple[int, ...]
    design: Float[np.ndarray, "N K"]
    masked: Mapping[str, Float[np.ndarray, " N"]]
    bare: Mapping[str, Float[np.ndarray, " N"]]


def pair(plan: Plan, bare: Iterable[Observed], masked: Iterable[Observed], identity: Identity) -> tuple[Pairs, tuple[str, ...]]:
    """Pairs bare and masked episodes under the contract.

    Returns the pairs of the rows that are in order, and every breach of the contract in words; any breach makes the gate incomplete.
    """
    problems: list[str] = []
    assigned = {(a.task_id, a.sample): a.chunk_ids for a in plan.assignments}
    bare_found = _accept("bare", bare, dict.fromkeys(assigned, ()), identity, problems)
    masked_found = _accept("masked", masked, assigned, identity, problems)
    keys = [k for k in assigned if k in bare_found and k in masked_found]
    found = [x.outcomes for k in keys for x in (bare_found[k], masked_found[k])]
    outcomes = list(found[0]) if found else []
    if any(set(o) != set(outcomes) for o in found):
        problems.append(f"episodes report different outcomes: {sorted({name for o in found for name in o})} are not in all of them")
        outcomes = [name for name in outcomes if all(name in o for o in found)]
    where = [i for i, a in enumerate(plan.assignments) if (a.task_id, a.sample) in set(keys)]
    values = [{n: np.array([x[k].outcomes[n] for k in keys], np.float64) for n in outcomes} for x in (masked_found, bare_found)]
    pairs = Pairs(plan.columns, tuple(k[0] for k in keys), tuple(k[1] for k in keys), plan.design[where], values[0], values[1])
    return pairs, tuple(problems)


def _accept(
    arm: str, episodes: Iterable[Observed], expected: Mapping[tuple[str, int], tuple[str, ...]], identity: Identity, problems: list[str]
) -> dict[tuple[str, int], Observed]:
    """The episodes of one arm that keep the contract, by (task, sample); breaches are appended to `problems`."""
    found: dict[tuple[str, int], Observed] = {}
    for episode in episodes:
        key, name = (episode.task_id, episode.sample), f"{arm} episode of task {episode.task_id} sample {episode.sample}"
        if not episode.scored:
            continue  # a technical failure: it may be run again, until then its row is missing
        differ = [
            f"{f.name} {getattr(episode.identity, f.name)[:12]} != {getattr(identity, f.name)[:12]}"
            for f in dataclasses.fields(Identity)
            if getattr(episode.identity, f.name) != getattr(identity, f.name)
        ]
        if key not in expected:
            problems.append(f"{name} is not in the plan")
        elif key in found:
            problems.append(f"{name} was completed twice")
        elif differ:
            problems.append(f"{name} is of another identity: {', '.join(differ)}")
        elif episode.injected != expected[key]:
            problems.append(f"{name} carried {list(episode.injected)}, assigned were {list(expected[key])}")
        elif not all(math.isfinite(v) for v in episode.outcomes.values()):
            problems.append(f"{name} has an outcome that is not finite: {dict(episode.outcomes)}")
        else:
            found[key] = episode
    problems += [f"{arm} episode of task {k[0]} sample {k[1]} is missing" for k in expected if k not in found]
    return found
