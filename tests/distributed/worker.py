"""A process of a job that trains a tiny model for a few updates: process 0 makes the calls, the others follow.

Arguments: what to do, a scratch directory, then the flags of the process's place in its job. What to do: `train`, or how one process ends at its
first update (`killed`, `stopped`, `failing`) or while process 0 waits for its engines (`killed-waiting`), preceded by its number: `2:killed`. A
`lonely` one has little patience for the others to come.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from grpo import toy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from intraskill import followers, weights
from intraskill.checkpoint import Checkpointer
from intraskill.followers import Command, Follower, LedCheckpointer, LedLearner
from intraskill.grpo.learner import Learner, OptimizerConfig
from intraskill.grpo.loss import ClippedPolicyGradient
from intraskill.grpo.packing import Episode, Rows, pack_microbatches
from intraskill.grpo.policy import qwen35_learner
from intraskill.models.qwen35 import model, sharding
from intraskill.models.qwen35.config import ModelConfig
from intraskill.process_start import Place
from intraskill.types import InputError
from launch import entry

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    full_attention_interval=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    max_positions=64,
    chunk_size=16,
)
SETTINGS = ConfigDict({"detect": False, "start_seconds": 300.0, "heartbeat_seconds": 60.0})
ROWS = 4


def make_learner():
    mesh = sharding.make_mesh(1, jax.device_count(), 1)
    # Large steps beside the tolerance of 1e-5: three updates move a parameter by up to 3e-4.
    return qwen35_learner(CONFIG, mesh, OptimizerConfig(learning_rate=1e-4), ClippedPolicyGradient(), temperature=0.7, banned_ids=(3,))


def make_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(scale=0.3, size=leaf.shape).astype(leaf.dtype), model.abstract_params(CONFIG))


def make_toy():
    """A learner of next tokens by a table, which compiles at once, and its parameters: for jobs that end anyway."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings, decay = {"table": whole, "scale": whole}, {"table": True, "scale": False}
    learner = Learner(
        toy.log_probs, ClippedPolicyGradient(), OptimizerConfig(), mesh=mesh, param_shardings=shardings, decay_mask=decay, rows_axes=("data",)
    )
    return learner, {"table": np.eye(toy.VOCABULARY, dtype=np.float32), "scale": np.ones(1, np.float32)}


def make_batch(seed: int, vocabulary: int = CONFIG.vocab_size, rows: int = ROWS):
    """Microbatches of random episodes."""
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(12):
        tokens = rng.integers(4, vocabulary, rng.integers(12, 30))
        mask = rng.random(len(tokens)) < 0.5
        mask[0], mask[-1] = False, True
        episodes.append(Episode(tokens, mask, np.where(mask, -1.0, 0.0), rng.normal()))
    return pack_microbatches(episodes, Rows(length=48, trained=32, count=rows))[0]


def flat(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def lead_training(lead, scratch: Path) -> None:
    """Three updates, the state saved after the second; then the third again from what was saved; then publication."""
    lead.tell(Command.PREPARE)
    learner, checkpoints = LedLearner(lead, make_learner()), LedCheckpointer(lead, make_checkpoints(scratch))
    state = learner.init(make_params())
    first, second = ([*learner.old_log_probs(state, make_batch(seed))] for seed in (1, 2))
    state, _ = learner.update(state, first)
    state, metrics = learner.update(state, second)
    checkpoints.save(2, state, {"step": 2, "round_starts": [0]})
    third = learner.old_log_probs(state, make_batch(3))
    state, metrics = learner.update(state, third)
    params = lead.whole(state.params)
    np.savez(scratch / "after.npz", **flat(params))
    restored = checkpoints.restore(learner.abstract_state(model.abstract_params(CONFIG)))
    again, _ = learner.update(restored.state, learner.old_log_probs(restored.state, make_batch(3)))
    np.savez(scratch / "again.npz", **flat(lead.whole(again.params)))
    published = weights.publish(scratch / "weights", 3, CONFIG, params)
    assert weights.digest_of(CONFIG, weights.read(published, CONFIG)) == published.digest
    checkpoints.close()
    print(f"loss {metrics['loss']:.6f} position {restored.position} processes {lead.num_processes}", flush=True)


def make_checkpoints(scratch: Path) -> Checkpointer:
    return Checkpointer(scratch / "checkpoints", model_config=dataclasses.asdict(CONFIG))


def end_as(manner: str) -> None:
    if manner == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if manner == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise InputError(f"this process is {manner}: look elsewhere")


def lead_until_the_end(lead, manner: str, scratch: Path) -> None:
    """One update after the other."""
    lead.tell(Command.PREPARE)
    make_checkpoints(scratch)
    if manner == "killed-waiting":
        print("waiting", flush=True)
        time.sleep(600)  # as while the engines play
    toy_learner, params = make_toy()
    learner = LedLearner(lead, toy_learner)
    state = learner.init(params)
    batch = learner.old_log_probs(state, make_batch(1, toy.VOCABULARY, jax.device_count()))
    for _ in range(10_000):
        state, _ = learner.update(state, batch)


class Ending:
    """A learner whose process ends at its first update."""

    def __init__(self, learner, manner: str):
        self._learner, self._manner = learner, manner

    def __getattr__(self, name: str):
        return getattr(self._learner, name)

    def update(self, *_):
        end_as(self._manner)


def main() -> None:
    task, scratch, *flags = sys.argv[1:]
    if task == "alone":  # nobody says where this process belongs, and there is no cluster to ask
        with followers.join(Place(), ConfigDict({**SETTINGS, "detect": True})) as lead:
            print(f"processes {lead.num_processes}, devices {jax.device_count()}", flush=True)
        return
    address, number, process = (flag.partition("=")[2] for flag in flags)
    ending, _, manner = task.rpartition(":")
    impatient = {"stopped": {"heartbeat_seconds": 15.0}, "lonely": {"start_seconds": 5.0}}
    settings = ConfigDict({**SETTINGS, **impatient.get(manner, {})})
    with entry.one_line_errors(), followers.join(Place(address, int(number), int(process)), settings) as team:
        if isinstance(team, Follower):
            command, _, _ = team.receive()
            assert command == Command.PREPARE
            if manner == "train":
                followers.follow(team, make_learner(), make_checkpoints(Path(scratch)), make_params())
                return
            if manner == "killed-waiting" and process == ending:
                print("waiting", flush=True)
            learner, params = make_toy()
            followers.follow(team, Ending(learner, manner) if process == ending else learner, make_checkpoints(Path(scratch)), params)
        elif manner == "train":
            lead_training(team, Path(scratch))
        else:
            lead_until_the_end(team, manner, Path(scratch))


if __name__ == "__main__":
    main()
