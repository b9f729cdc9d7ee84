"""A step of the fast loop with the next step's rollout beside the update, against one after the other.

    python benchmarks/bench_overlap.py [--steps=6] [--repeats=3]

Everything is the run's own code: the pipeline, the agent, the pocket shop over HTTP, packing, the pocket policy's learner, publishing. Only the
engine is another: it takes a fixed time for each token, by waiting, and uses no CPU, as an engine on another machine would. It writes the same call
every turn. One round calibrates the time of a token so that rollout and update cost the same; then rounds of `--steps` steps alternate between both
modes. A step's time is a round's divided by its steps, so what the pipeline costs to fill and to drain is in it. Target: <= 0.75.
"""

import argparse
import asyncio
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/intraskill/jax"))

import rich.console  # noqa: E402

from benchmarks.interleave import verdict  # noqa: E402
from configs import pocket  # noqa: E402
from intraskill import parts, pipeline, slow_loop  # noqa: E402
from intraskill.fast_loop import Position  # noqa: E402
from intraskill.followers import Lead  # noqa: E402
from intraskill.run_directory import RunDirectory  # noqa: E402
from intraskill.telemetry import Progress  # noqa: E402
from intraskill.types import Completion, Health, Published, Sampling, Session, ToolCall  # noqa: E402
from launch import shop as shops  # noqa: E402
from shop_env.client import ShopClient  # noqa: E402

TARGET = 0.75
ALIKE = (0.8, 1.25)  # rollout / update of the on-policy rounds: outside, the two did not cost the same and the ratio says little


class WaitingEngine:
    """Samples the same turn always, `seconds_per_token` a token for every session at once."""

    def __init__(self, turn: Sequence[int]):
        self._turn = tuple(turn)
        self._health = Health(True, -1, "")
        self.seconds_per_token = 0.0

    @property
    def tokens_per_turn(self) -> int:
        return len(self._turn)

    async def generate(self, prompt_ids: Sequence[int], *, session: Session, sampling: Sampling) -> Completion:
        version = self._health.weight_version
        seconds = self.seconds_per_token * len(self._turn)
        await asyncio.sleep(seconds)
        return Completion(self._turn, (-1.0,) * len(self._turn), "stop", (version,), 0, seconds)

    async def release(self, session: Session) -> None:
        """There is nothing to forget."""

    async def load_weights(self, published: Published) -> None:
        self._health = Health(True, published.version, published.digest)

    async def healthy(self) -> Health:
        return self._health

    async def close(self) -> None:
        """There is nothing to let go of."""


class Recorder(list):
    """The metrics of the rounds, in memory."""

    def write(self, record: dict) -> None:
        self.append(record)

    def state(self) -> dict:
        return {}

    def close(self) -> None:
        """There is no file."""


def _config(directory: str, steps: int):
    config = pocket.get_config("demo")
    config.update({"name": "overlap", "runs_directory": directory})
    config.schedule.update({"rounds": 1, "steps_per_round": steps})
    config.rollout.update({"group_size": 4, "groups_per_step": 6, "oversample": 6, "max_steps": 8, "overlap": 1})
    config.grpo.update({"sampler_correction": "truncate", "learning_rate": 1e-9})
    config.checkpoint.every_steps = steps
    parts.check_settings(config)
    return config


def _costs(records: list[dict]) -> dict[str, float]:
    """Seconds a step of one round: whole, in the rollout, in the sync, and what is left for the update when nothing overlaps."""
    steps = sum(r["kind"] == "sync" for r in records)
    sums = {kind: sum(r["seconds"] for r in records if r["kind"] == kind) / steps for kind in ("rollout", "sync")}
    whole = sum(r.get("step_seconds", 0.0) for r in records) / steps
    return {"step": whole, **sums, "update": whole - sums["rollout"] - sums["sync"]}


async def _measure(built: parts.Parts, engine: WaitingEngine, repeats: int) -> dict[int, list[dict[str, float]]]:
    """Costs of each mode's rounds, after one that compiles and one that calibrates."""
    slow_loop.begin(built)
    bank, curriculum = slow_loop.load_round(built, 0)
    state, position, index = built.learner.init(built.policy.params), Position(), 0

    async def play(overlap: int) -> dict[str, float]:
        nonlocal state, position, index
        built.config.rollout.overlap, built.metrics = overlap, Recorder()
        state, position, _ = await pipeline.fast_round(built, state, position.enter(index), bank, curriculum, index)
        index += 1
        return _costs(built.metrics)

    await play(0)
    costs = await play(0)  # without waiting: what the rollout costs this machine by itself, and what it has to wait for
    turns = built.config.rollout.max_steps
    engine.seconds_per_token = max(0.0, costs["update"] - costs["rollout"]) / (turns * engine.tokens_per_turn)
    print(
        f"the rollout's own work {costs['rollout']:.2f} s a step, the update {costs['update']:.2f} s: a token takes {engine.seconds_per_token:.4f} s"
    )
    found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(repeats):
        for overlap in found:
            found[overlap].append(await play(overlap))
    return found


async def _run(config, served: shops.Served, repeats: int) -> dict[int, list[dict[str, float]]]:
    async with ShopClient(served.url, served.key) as client:
        shop = shops.ClientShop(client)
        inputs = await parts.load(config, shop)
        call = ToolCall("search", {"query": "lamp"})
        engine = WaitingEngine(inputs.policy.chat.assistant("search", call))
        with (
            RunDirectory.create(Path(config.runs_directory) / config.name, config.to_dict()) as run,
            Progress(console=rich.console.Console(quiet=True)) as progress,
        ):
            built = parts.build(config, dataclasses.replace(inputs, engine=engine), run, progress, shop, served.identity, Lead())
            built.metrics.close()
            try:
                return await _measure(built, engine, repeats)
            finally:
                await built.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each mode")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = _config(directory, arguments.steps)
        with shops.serve(config) as served:
            found = asyncio.run(_run(config, served, arguments.repeats))
    medians = {mode: {name: statistics.median(c[name] for c in costs) for name in costs[0]} for mode, costs in found.items()}
    print(f"{'seconds a step':20s} {'on-policy':>10s} {'overlapped':>10s}")
    for name in ("step", "rollout", "sync"):
        print(f"{name:20s} {medians[0][name]:10.3f} {medians[1][name]:10.3f}")
    print(f"{'update':20s} {medians[0]['update']:10.3f}")
    alike = medians[0]["rollout"] / medians[0]["update"]
    print(f"rollout / update, on-policy: {alike:.2f}")
    if not ALIKE[0] <= alike <= ALIKE[1]:
        print("they did not cost the same: something else used the machine; run it again")
        return 1
    return verdict("overlap", {"step time, overlapped / on-policy": (medians[1]["step"] / medians[0]["step"], TARGET, False)})


if __name__ == "__main__":
    sys.exit(main())
