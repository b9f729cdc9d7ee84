"""What a run will do and roughly need, worked out from its config before it starts."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.model import abstract_params
from intraskill.skills import assignment
from intraskill.skills.bank import Bank

# Share of the machine's matrix-product rate that each kind of work reaches with the pocket model on two CPU cores. The estimate of time
# is good to a factor of about two there while nothing else runs, and says so; for an accelerator it means nothing.
_TRAIN_EFFICIENCY = 0.11
_DECODE_EFFICIENCY = 0.035
_EPISODE_TOKENS = 0.3  # of max_context, a typical episode
_SAMPLED_SHARE = 0.2  # of an episode's tokens
_RECORD_BYTES_PER_TOKEN = 60  # group files: ids, log-probs, texts


@dataclasses.dataclass(frozen=True)
class Plan:
    """Counts are exact, seconds and bytes are estimates.

    `detectable_effect` is what a gate with every candidate finds four times in five if bare and masked success were independent and 50%, the worst
    case; infinite when it could not tell its chunks apart, 0 for a run without a gate.
    """

    num_params: int
    tasks: dict[str, int]
    rounds: int
    steps: int
    updates: int
    generated_episodes: int
    trained_episodes: int
    evaluated_episodes: int
    detectable_effect: float
    seconds: float
    memory_bytes: int
    disk_bytes: int


def _matmul_rate() -> float:
    """Floating-point operations a second of a plain fp32 matrix product on this machine, measured for a moment."""
    a = np.ones((512, 512), np.float32)
    np.matmul(a, a)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        np.matmul(a, a)
        count += 1
    return count * 2 * 512**3 / (time.perf_counter() - start)


def _count_params(shape: ModelConfig) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(abstract_params(shape)))


def of(config: Any) -> Plan:
    """The plan of a training run. Raises InputError when the checkpoint directory is missing or no model."""
    shape = hf.load_config(config.model.checkpoint)
    schedule, rollout = config.schedule, config.rollout
    steps = schedule.rounds * schedule.steps_per_round
    generated = steps * rollout.oversample * rollout.group_size
    trained = steps * rollout.groups_per_step * rollout.group_size
    pairs, gated = config.validation.tasks * config.validation.samples, config.bank.revision == "gated"
    columns = len(Bank.load(config.bank.path).chunks) + config.analysis.max_candidates
    validation = pairs * (1 + (2 if gated else 1) * schedule.rounds)
    evaluated = validation + 4 * config.test.tasks * config.test.samples
    params = _count_params(shape)
    tokens = rollout.max_context * _EPISODE_TOKENS
    played = (generated + evaluated) * tokens * (2 * params) * (1 + _SAMPLED_SHARE * (_TRAIN_EFFICIENCY / _DECODE_EFFICIENCY - 1))
    learned = trained * tokens * (8 * params)
    seconds = (played + learned) / (_matmul_rate() * _TRAIN_EFFICIENCY) + 60
    state = params * 4
    caches = (
        rollout.num_slots * rollout.max_context * 2 * shape.num_kv_heads * shape.head_dim * 4 * (shape.num_layers // shape.full_attention_interval)
    )
    keep, keep_every = config.checkpoint.keep, config.checkpoint.keep_every
    checkpoints = keep + 1 + (steps // keep_every if keep_every else 0)  # the newest, the one being written, those kept for good
    activations = config.grpo.rows_per_microbatch * config.grpo.row_length * shape.num_layers * (shape.hidden_size + shape.intermediate_size) * 4 * 8
    return Plan(
        num_params=params,
        tasks={"train": config.shop.train, "validation": config.validation.tasks, "test": config.test.tasks},
        rounds=schedule.rounds,
        steps=steps,
        updates=steps * config.grpo.updates_per_step,
        generated_episodes=generated,
        trained_episodes=trained,
        evaluated_episodes=evaluated,
        detectable_effect=assignment.expected_effect(pairs, columns, assignment.independent_sigma(0.5)) if gated else 0.0,
        seconds=seconds,
        memory_bytes=6 * state + caches + activations + (1 << 30),
        disk_bytes=3 * state * checkpoints + 3 * state + int((generated + evaluated / 8) * tokens * _RECORD_BYTES_PER_TOKEN),
    )


def _describe_gate(plan: Plan) -> str:
    if not plan.detectable_effect:
        return "none"
    if math.isinf(plan.detectable_effect):
        return "too few pairs to tell the chunks apart when all candidates come: raise validation.tasks or validation.samples"
    return f"finds effects of {plan.detectable_effect:.2f} reward four times in five at worst, smaller ones where outcomes of a pair agree"


def show(plan: Plan, directory: Path, console: rich.console.Console | None = None) -> None:
    """Prints the plan as a table."""
    table = rich.table.Table(title="plan", show_header=False)
    generated = f"{plan.generated_episodes:,} generated (more if some fail)"
    rows = {
        "run directory": str(directory),
        "parameters": f"{plan.num_params:,}",
        "tasks": ", ".join(f"{count:,} {split}" for split, count in plan.tasks.items()),
        "schedule": f"{plan.rounds} rounds, {plan.steps} steps, {plan.updates} updates",
        "episodes": f"{generated}, {plan.trained_episodes:,} trained on, {plan.evaluated_episodes:,} evaluated",
        "gate": _describe_gate(plan),
        "time": f"about {plan.seconds / 60:.0f} min on this machine, within a factor of two when nothing else runs",
        "memory": f"about {plan.memory_bytes / 1e9:.1f} GB",
        "disk": f"about {plan.disk_bytes / 1e6:.0f} MB",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    (console or rich.console.Console()).print(table)
