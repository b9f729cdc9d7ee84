"""The slow loop's arrows: retry, analysis, candidates, validation, gate, next bank and curriculum, at one frozen checkpoint.

`bank.revision` says who decides about the bank: "gated" is the method; "ungated" takes the analyst's candidates on trust; "fixed" keeps the bank, so
there is nothing to retry, analyse or measure. Bare validation is played in any case.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intraskill import evaluation
from intraskill.evaluation import Case, Result
from intraskill.fast_loop import Position, chunks_of, group_path, read_group
from intraskill.parts import RETRY, VALIDATE_BARE, VALIDATE_MASKED, Parts
from intraskill.rollout import records
from intraskill.rollout.collect import Assignment, collect_groups
from intraskill.run_directory import read_json, write_json
from intraskill.skills import assignment, compiler, gate, retrieval, triage
from intraskill.skills import curriculum as curricula
from intraskill.skills.bank import Bank, CandidatePool, adopt
from intraskill.skills.cards import Card
from intraskill.skills.curriculum import Curriculum
from intraskill.skills.gate import next_bank
from intraskill.skills.ledger import Fate, Ledger, measured
from intraskill.types import Group, InputError, Mask, MaskKind, Published, Task, Trajectory


def groups_of_round(parts: Parts, round_index: int, position: Position) -> list[Group]:
    """The groups that the round's steps played, from disk, in order; `position` is the one at the round's end.

    Files of other groups go: an interrupted run played them with weights that the resumed one did not come to.
    """
    paths = [group_path(parts, round_index, i) for i in range(position.round_starts[round_index], position.next_group)]
    for path in set(paths[0].parent.glob("*.json")) - set(paths):
        path.unlink()
    return [read_group(path) for path in paths]


async def retry(parts: Parts, published: Published, groups: Sequence[Group], bank: Bank, round_index: int) -> list[triage.Case]:
    """Plays each all-wrong group's task once more with the full bank; the verdicts, written beside the groups as soon as there are any.

    A retry that an interrupted run finished at the same weights is read, not played again.
    """
    cases = {group.index: triage.triage(group) for group in groups}
    if parts.config.bank.revision == "fixed":
        return list(cases.values())
    waiting = [c.group for c in cases.values() if c.triage == triage.Triage.RETRY]
    parts.progress.start(f"round {round_index}: retries", len(waiting))
    mask = bank.full_mask

    def settle(index: int, retried: Trajectory) -> None:
        cases[index] = triage.after_retry(cases[index], retried)
        parts.progress.advance(f"round {round_index}: retries")

    def keep(played: Group) -> None:
        (retried,) = played.trajectories
        settle(played.index, retried)
        case = cases[played.index]
        record = records.to_json(case.group) | {"triage": str(case.triage), "retry": records.trajectory_to_json(retried)}
        write_json(group_path(parts, round_index, played.index), record)

    pending = []
    for group in waiting:
        retried = _recorded_retry(parts, group_path(parts, round_index, group.index), mask, published.digest)
        if retried is None:
            pending.append(Assignment(group.index, group.task, mask, chunks_of(bank, mask)))
        else:
            settle(group.index, retried)
    await collect_groups(parts.rollout(RETRY, group_size=1), pending, keep)
    parts.progress.finish(f"round {round_index}: retries")
    return list(cases.values())


def _recorded_retry(parts: Parts, path: Path, mask: Mask, digest: str) -> Trajectory | None:
    """The retry in a group's file, where it is the one to play now: under the full bank, by the weights `digest`, and scored."""
    record = read_json(path)
    if "retry" not in record:
        return None
    try:
        retried = records.trajectory_from_json(record["retry"])
    except InputError as error:
        parts.progress.say(f"{path}: the retry is played again: {error}")
        return None
    return retried if retried.scored and retried.injected == mask.chunk_ids and set(retried.weights) <= {digest} else None


async def analyse(parts: Parts, cases: Sequence[triage.Case], bank: Bank, round_index: int) -> list[Card]:
    """A card for each retry that failed, up to the configured number, in group order."""
    pending = [c for c in cases if c.triage == triage.Triage.PENDING_ANALYSIS][: parts.config.analysis.max_cards]
    require_history(parts, round_index)
    tried = _ledger(parts).turned_down(round_index)
    parts.progress.start(f"round {round_index}: analysis", len(pending))
    cards = []
    for case in pending:
        assert case.retry is not None  # a case without one is not pending analysis
        card_id = f"r{round_index:03d}-g{case.group.index:08d}"
        cards.append(await parts.analyst.analyse(card_id, case.group.task, case.retry, bank, tried=tried))
        parts.progress.advance(f"round {round_index}: analysis")
    parts.progress.finish(f"round {round_index}: analysis")
    write_json(parts.run.round(round_index) / "cards.json", [card.to_json() for card in cards])
    return cards


def _ledger(parts: Parts) -> Ledger:
    return Ledger(parts.run.path / "ledger.jsonl")


def require_history(parts: Parts, round_index: int) -> None:
    """Raises InputError where the ledger lacks what an earlier round put there: what was turned down would be proposed again, unseen."""
    ledger = _ledger(parts)
    entries = ledger.entries()
    for index in range(round_index):
        summary, path = read_json(parts.run.round(index) / "summary.json"), parts.run.round(index) / "gate.json"
        wanted = {(Fate.CANDIDATE, name) for name in (summary.get("candidates", ()) if isinstance(summary, dict) else ())}
        if path.is_file():
            wanted |= {(Fate.MEASURED, decision.id) for decision in gate.GateResult.load(path).decisions}
        if lost := sorted(wanted - {(e.fate, e.chunk_id) for e in entries if e.round == index}):
            raise InputError(
                f"{ledger.path} lacks {len(lost)} entries of round {index}, e.g. that {lost[0][1]} was {lost[0][0]}: restore it from a copy; "
                "without them what was turned down would be proposed again"
            )


def compile_candidates(parts: Parts, cards: Sequence[Card], bank: Bank, round_index: int) -> CandidatePool:
    """At most a few candidates from many cards; every card's fate goes to the ledger."""
    ledger = _ledger(parts)
    compiled = compiler.compile_cards(
        cards,
        bank,
        ledger,
        round_index=round_index,
        general=parts.general_words,
        max_candidates=parts.config.analysis.max_candidates,
    )
    ledger.append(compiled.entries)
    compiled.pool.save(parts.run.round(round_index) / "candidates.json")
    return compiled.pool


def validation_tasks(parts: Parts) -> Sequence[Task]:
    return parts.tasks["validation"][: parts.config.validation.tasks]


async def bare_validation(parts: Parts, published: Published, bank: Bank, name: str) -> Result:
    """The validation tasks without skills at `published`."""
    planned = evaluation.cases(validation_tasks(parts), parts.config.validation.samples, Mask.skill_free(), ())
    return await play(parts, name, VALIDATE_BARE, planned, published, bank)


async def play(parts: Parts, name: str, stream: int, planned: Sequence[Case], published: Published, bank: Bank) -> Result:
    """Plays the episodes of one condition under `eval/<name>/`, with a progress bar."""
    label = f"evaluation {name}"
    parts.progress.start(label, len(planned))
    result = await evaluation.run(
        parts.run.path / "eval" / name,
        name,
        parts.rollout(stream, group_size=1),
        planned,
        parts.identity(published.digest),
        bank.sha256,
        lambda: parts.progress.advance(label),
    )
    parts.progress.finish(label)
    return result


def guided_cases(parts: Parts, bank: Bank, tasks: Sequence[Task], samples: int) -> list[Case]:
    """The tasks with the guidance that a user of the trained policy would give: the whole bank, or what is retrieved for each task."""
    num = parts.config.curriculum.retrieve
    if not num:
        return evaluation.cases(tasks, samples, bank.full_mask, bank.chunks)
    masks = [Mask(MaskKind.RETRIEVED, retrieval.nearest(bank, task, num)) for task in tasks]
    return [case for task, mask in zip(tasks, masks, strict=True) for case in evaluation.cases([task], samples, mask, chunks_of(bank, mask))]


async def gate_round(
    parts: Parts, published: Published, pool: CandidatePool, round_index: int
) -> tuple[Result, Result | None, gate.GateResult | None]:
    """Bare and masked validation of current chunks and candidates together at the frozen checkpoint, and what the gate makes of them.

    Returns the bare result, the masked one (None where none was played) and the gate's (None for a run without one).

    Raises InputError when episodes are missing: the run stops, and plays them when it is resumed. If that fails too, the gate stays incomplete.
    """
    bare = await bare_validation(parts, published, pool.bank, f"round{round_index:03d}-bare")
    if parts.config.bank.revision != "gated":
        return bare, None, None
    plan = plan_gate(parts, pool, bare, round_index)
    masked = None if plan.problem else await masked_validation(parts, published, pool, plan, f"round{round_index:03d}-masked")
    observed = masked.observed if masked else ()
    result = gate.run(plan, bare.observed, observed, parts.identity(published.digest), max_active=parts.config.bank.max_active)
    path = parts.run.round(round_index) / "gate.json"
    stop = bool(result.problems) and not plan.problem and not path.is_file()
    result.save(path)
    if stop:
        raise InputError(
            f"round {round_index}: the gate is incomplete and selects nothing: {len(result.problems)} problems, e.g. {result.problems[0]}; see "
            f"{path}, look at the engine's and the shop's logs, then resume the run: only the missing episodes are played"
        )
    _ledger(parts).append(measured(pool, result, round_index))
    for problem in result.problems[:3]:
        parts.progress.say(f"round {round_index}: the gate is incomplete and changes nothing: {problem}")
    return bare, masked, result


def plan_gate(parts: Parts, pool: CandidatePool, bare: Result, round_index: int) -> assignment.Plan:
    """The gate's assignments and, said and recorded before a masked episode is paid for, the effects that they can find."""
    # A seed for each round: with one for all, a chunk that stays active would meet the same tasks every time.
    seed = parts.config.seed * 1000 + round_index
    ids = [task.id for task in validation_tasks(parts)]
    plan = assignment.assign(pool, seed=seed, split="validation", task_ids=ids, samples=parts.config.validation.samples)
    plan = assignment.with_power(plan, *_residual(parts, bare, round_index))
    plan.save(parts.run.round(round_index) / "assignments.json")
    assert plan.power is not None
    parts.progress.say(f"round {round_index}: {plan.problem or plan.power.describe(len(plan.assignments))}")
    return plan


def _residual(parts: Parts, bare: Result, round_index: int) -> tuple[float, str]:
    """The standard deviation to expect of a pair's difference, and where it is from: the last gate's residual, else independent outcomes."""
    path = parts.run.round(round_index - 1) / "gate.json"
    if round_index and path.is_file():
        earlier = gate.GateResult.load(path)
        sigma = earlier.fits[earlier.outcome].sigma if earlier.status == "complete" and earlier.fits else None
        if sigma:
            return sigma, f"the residual of round {round_index - 1}"
    scored = [o.success for o in bare.outcomes if o.scored]
    rate = (sum(scored) + 1) / (len(scored) + 2)  # never 0 or 1, which would promise that everything is seen
    return assignment.independent_sigma(rate), f"as if bare and masked success, {rate:.0%}, were independent"


async def masked_validation(parts: Parts, published: Published, pool: CandidatePool, plan: assignment.Plan, name: str) -> Result:
    """The validation tasks under the plan's masks at `published`."""
    by_id = {task.id: task for task in validation_tasks(parts)}
    planned = [Case(by_id[a.task_id], a.sample, a.mask, tuple(pool.chunks[i] for i in a.chunk_ids)) for a in plan.assignments]
    return await play(parts, name, VALIDATE_MASKED, planned, published, pool.bank)


def next_round(
    parts: Parts, bank: Bank, curriculum: Curriculum, pool: CandidatePool, result: gate.GateResult | None, round_index: int
) -> tuple[Bank, Curriculum]:
    """The next round's bank and curriculum: what the gate decided, or the candidates on trust, or both as they were, as after an incomplete gate."""
    if result is not None and result.status == "complete":
        bank = next_bank(pool, result, round_index=round_index)
        curriculum = make_curriculum(parts.config, bank, result.contributions)
    elif parts.config.bank.revision == "ungated" and pool.candidates:
        bank = adopt(pool, parts.config.bank.max_active)
        curriculum = make_curriculum(parts.config, bank, {})
    save_round(parts, bank, curriculum, round_index + 1)
    return bank, curriculum


def make_curriculum(config: Any, bank: Bank, contributions: Mapping[str, float]) -> Curriculum:
    """The curriculum of `bank` under the run's settings."""
    settings = config.curriculum
    return curricula.build(
        bank,
        contributions,
        seed=config.seed,
        q=settings.q,
        rho_min=settings.rho_min,
        rho_max=settings.rho_max,
        rho_unmeasured=settings.rho_unmeasured,
        scale=settings.scale or None,
        withdraw_over=settings.withdraw_over,
        retrieve=settings.retrieve,
        mixed=settings.mixed,
    )


def begin(parts: Parts) -> None:
    """Writes what round 0 starts from; a resumed run must be given the bank that it began with."""
    directory = parts.run.round(0)
    if not (directory / "curriculum.json").is_file():  # the second of the two files
        save_round(parts, parts.initial_bank, make_curriculum(parts.config, parts.initial_bank, {}), 0)
    elif Bank.load(directory / "bank.json").sha256 != parts.initial_bank.sha256:
        given = parts.config.bank.path
        raise InputError(
            f"{given} is not the bank that this run began with ({directory / 'bank.json'}): put that one back, or start a run of another name"
        )


def save_round(parts: Parts, bank: Bank, curriculum: Curriculum, round_index: int) -> None:
    """Writes what a round starts from."""
    bank.save(parts.run.round(round_index) / "bank.json")
    curriculum.save(parts.run.round(round_index) / "curriculum.json")


def load_round(parts: Parts, round_index: int) -> tuple[Bank, Curriculum]:
    """What a round starts from, as `save_round` wrote it."""
    bank = Bank.load(parts.run.round(round_index) / "bank.json")
    return bank, Curriculum.load(parts.run.round(round_index) / "curriculum.json", bank)
