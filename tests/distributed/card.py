"""The pod's own command, `launch/train.py --config=configs/coevolve.py`, at sizes for two cores."""

from collections.abc import Sequence
from pathlib import Path

# Only what a user has to change to run it here. Nothing that decides how the method works is among them.
SIZES = {
    "shop.num_products": 100,
    "shop.train": 40,
    "shop.validation": 12,
    "shop.test": 12,
    "shop.page_size": 5,
    "shop.max_actions": 12,
    "schedule.rounds": 2,
    "schedule.steps_per_round": 1,
    "rollout.group_size": 4,
    "rollout.groups_per_step": 2,
    "rollout.oversample": 2,
    "rollout.max_context": 640,
    "rollout.max_new_tokens": 24,
    "rollout.max_steps": 6,
    "rollout.num_slots": 8,
    "grpo.row_length": 640,
    "grpo.row_unit": 320,
    "grpo.trained_per_row": 160,
    "grpo.rows_per_microbatch": 2,
    "validation.tasks": 12,
    "test.tasks": 2,
    "analysis.max_cards": 2,
    "mesh.fsdp": 2,
}
PATHS = ("runs_directory", "model.checkpoint")
ADDRESSES = ("engine.addresses",)  # and the flags that place a process in its job
PERMITTED = frozenset((*SIZES, *PATHS, *ADDRESSES))

CONFIG = "--config=configs/coevolve.py"


def flags(runs: Path, addresses: Sequence[str], **sizes: int) -> list[str]:
    """The command's arguments; keyword arguments change sizes, with `__` for a dot."""
    listed = "".join(f"'{address}'," for address in addresses)
    values = {**SIZES, **{k.replace("__", "."): v for k, v in sizes.items()}}
    values |= {"runs_directory": runs, "model.checkpoint": "pocket/checkpoint", "engine.addresses": f"({listed})"}
    return [CONFIG, *(f"--config.{key}={value}" for key, value in values.items())]
