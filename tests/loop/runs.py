"""The smallest run of the whole loop: its flags, and what of a run's record must not depend on when it was interrupted."""

import json
from pathlib import Path

SETTINGS = {
    "shop.num_products": 100,
    "shop.train": 40,
    "shop.validation": 12,
    "shop.test": 12,
    "shop.max_actions": 12,
    "rollout.group_size": 4,
    "rollout.groups_per_step": 3,
    "rollout.oversample": 4,
    "rollout.max_context": 640,
    "rollout.max_new_tokens": 8,
    "rollout.max_steps": 12,
    "rollout.num_slots": 16,
    "rollout.decode_rows": 16,
    "grpo.learning_rate": 2e-4,
    "grpo.row_length": 640,
    "grpo.trained_per_row": 128,
    "validation.tasks": 12,
    "test.tasks": 4,
    "analysis.max_cards": 4,
}


def flags(config: str, runs: Path, name: str, checkpoint: Path, **settings) -> list[str]:
    """Command-line arguments; keyword arguments override, with `__` for a dot."""
    values = {
        **SETTINGS,
        "runs_directory": runs,
        "name": name,
        "model.checkpoint": checkpoint,
        **{k.replace("__", "."): v for k, v in settings.items()},
    }
    return [f"--config={config}", *(f"--config.{key}={value}" for key, value in values.items())]


_OTHER = {"time", "latency", "name", "versions"}
_DURATIONS = ("seconds", "per_second")


def timeless(value):
    """A JSON value without durations, moments, the run's own name and what it was run with."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in _OTHER and not k.endswith(_DURATIONS)}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def record(run: Path) -> dict[str, object]:
    """Everything that a run wrote and that two equal runs must share, by file name."""
    found: dict[str, object] = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        name = str(path.relative_to(run))
        if name.startswith(("checkpoints/", "tensorboard/", "weights/", "report/")) or name in ("config.json", "versions.json", "lock"):
            continue
        if path.suffix == ".jsonl":
            found[name] = [timeless(json.loads(line)) for line in path.read_text().splitlines()]
        elif name.startswith("export/"):
            found[name] = path.read_bytes()
        else:
            found[name] = timeless(json.loads(path.read_text()))
    return found
