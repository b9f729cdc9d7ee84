"""A small run directory, written by the code that writes real ones, with numbers that a reader can check."""

import json
import pathlib

import numpy as np

from intraskill.run_directory import RunDirectory, write_json, write_text
from intraskill.skills import assignment, curriculum, gate
from intraskill.skills.bank import Bank, Candidate, CandidatePool, Operation
from intraskill.telemetry import Metrics
from intraskill.types import Chunk

NUM_ROUNDS, STEPS, TASKS = 2, 5, 60
CONDITIONS = {"base": 0.4, "base-initial": 0.5, "final": 0.7, "final-full": 0.75}
VALIDATIONS = {"base-validation": 0.3, "round000-bare": 0.5, "round001-bare": 0.5, "round000-masked": 1.0}
EFFECTS = {"budget@1": 0.20, "search@1": 0.02, "search@2": 0.15, "colour@1": -0.15, "return@1": 0.10}


def chunk(name: str, version: int = 1) -> Chunk:
    return Chunk(name, version, title=f"{name} <{version}>", applies_when="", procedure=f"do {name}")


def write_run(path: pathlib.Path) -> pathlib.Path:
    """Two rounds of training, a gate each, four test conditions."""
    rng = np.random.default_rng(0)
    bank = Bank((chunk("budget"), chunk("search"), chunk("colour")))
    contributions: dict[str, float] = {}
    rounds = []
    with RunDirectory.create(path, {"name": "small", "seed": 1}) as run, Metrics(path) as metrics:
        for index in range(NUM_ROUNDS):
            bank.save(run.round(index) / "bank.json")
            plan = curriculum.build(bank, contributions, seed=1, q=0.2, rho_min=0.2, rho_max=0.9, rho_unmeasured=0.5)
            plan.save(run.round(index) / "curriculum.json")
            write_steps(metrics, index, plan, rng)
            pool = CandidatePool(bank, candidates(index))
            pool.save(run.round(index) / "candidates.json")
            result = measure(pool, index, rng)
            result.save(run.round(index) / "gate.json")
            bank, contributions = gate.next_bank(pool, result, round_index=index), result.contributions
            success = {"bare_success": 0.5, "masked_success": 0.6}
            rounds.append(
                {"round": index, **success, "bank_size": len(pool.bank.chunks), "admitted": [c.chunk.id for c in candidates(index)], "seconds": 61.5}
            )
        bank.save(run.round(NUM_ROUNDS) / "bank.json")
        write_evaluations(path)
        test = {c: {"success": p, "reward": p, "num_episodes": TASKS} for c, p in CONDITIONS.items()}
        write_json(path / "summary.json", {"rounds": rounds, "test": test, "comparisons": [], "versions": {}})
    return path


def candidates(index: int) -> tuple[Candidate, ...]:
    if index == 0:
        return (Candidate(chunk("search", 2), Operation.REWRITE), Candidate(chunk("return"), Operation.ADD))
    return ()


def write_steps(metrics: Metrics, index: int, plan: curriculum.Curriculum, rng: np.random.Generator) -> None:
    """Rollout steps of 40 groups whose masks are really drawn, and two updates each."""
    for s in range(STEPS):
        step = index * STEPS + s
        masks = [curriculum.mask(plan, 40 * step + g) for g in range(40)]
        free = sum(m.kind == "skill_free" for m in masks)
        inclusion = {i: sum(i in m.chunk_ids for m in masks) / (40 - free) for i in plan.chunk_ids}
        rates = {"skill_free_rate": free / 40, "inclusion": inclusion}
        success = 0.3 + 0.04 * step + 0.02 * rng.standard_normal()
        figures = {"reward": success + 0.05, "success": success, "scored_rate": 1.0, "groups_admitted": 16, "generated_groups": 40, "seconds": 3.0}
        metrics.write({"kind": "rollout", "round": index, "step": step, **figures, **rates})
        for _ in range(2):
            metrics.write({"kind": "update", "round": index, "step": step, "loss": 0.1, "grad_norm": float("nan")})


def measure(pool: CandidatePool, index: int, rng: np.random.Generator) -> gate.GateResult:
    identity = gate.Identity("weights", "sampling", "prompt", "environment")
    plan = assignment.assign(pool, seed=index, split="validation", task_ids=[f"v{i}" for i in range(TASKS)])
    bare, masked = [], []
    for a in plan.assignments:
        reward = 0.4 + sum(EFFECTS[i] for i in a.chunk_ids) + 0.05 * rng.standard_normal()
        bare.append(gate.Observed(a.task_id, 0, (), {"reward": 0.4, "success": float(int(a.task_id[1:]) % 2)}, identity))
        masked.append(gate.Observed(a.task_id, 0, a.chunk_ids, {"reward": reward, "success": 1.0}, identity))
    return gate.run(plan, bare, masked, identity, draws=200)


def write_evaluations(path: pathlib.Path) -> None:
    """The first p * TASKS tasks succeed, so conditions are nested; one more episode failed technically."""
    for condition, share in {**CONDITIONS, **VALIDATIONS}.items():
        lines = []
        for i in range(TASKS):
            success = i < round(share * TASKS)
            lines.append(
                {"task_id": f"t{i}", "sample": 0, "reward": float(success), "success": success, "status": "purchase", "turns": 5, "tokens": 60}
            )
        lines.append({"task_id": "t0", "sample": 1, "reward": 0.0, "success": False, "status": "technical", "turns": 0, "tokens": 0})
        write_text(path / "eval" / condition / "episodes.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
