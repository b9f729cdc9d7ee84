"""The warm start: cross-entropy on demonstrations and drills, through the project's own packing, learner and checkpoints."""

import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from intraskill.checkpoint import Checkpointer
from intraskill.grpo.learner import Learner, OptimizerConfig, TrainState
from intraskill.grpo.loss import CrossEntropy
from intraskill.grpo.packing import Episode, pack
from intraskill.grpo.policy import qwen35_learner
from intraskill.models.qwen35 import hf, model, sharding
from intraskill.models.qwen35.config import ModelConfig
from intraskill.rollout.chat import Chat, load_tokenizer
from intraskill.run_directory import plain, require_disk, take_lock, versions, write_json
from intraskill.telemetry import Progress
from intraskill.types import Batch, InputError
from pocket import skill_accuracy, tokenizer, vocabulary
from pocket.demonstrations import DemonstrationConfig, Demonstrator
from shop_env import session, synthetic

DEV_SEED = 7
REPORT_EVERY = 50
SAVE_EVERY = 250
ACCURACY_EPISODES = 300
DISK = 40_000_000  # bytes: two checkpoints of the parameters and their two moments, the weights, the tokenizer, the records


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """The recipe.

    Attributes:
      seed: of the parameters and of the stream of demonstrations.
      tokens: tokens in the rows of all updates together.
      worlds, world_seed: how many synthetic catalogues the demonstrations come from, seeds world_seed, world_seed + 1, ...: never those
        that a run trains, validates or tests on.
      drill_stock: P(a colour or size is in stock) in the worlds of drills.
      row_length, rows: the shape of an update; rows are filled from a pool of `pool` episodes.
    """

    seed: int = 0
    tokens: int = 12_000_000
    worlds: int = 8
    world_seed: int = 1000
    drill_stock: float = 0.6
    row_length: int = 1152
    rows: int = 3
    pool: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 60
    weight_decay: float = 0.05
    page_size: int = 5
    max_actions: int = 22
    demonstrations: DemonstrationConfig = DemonstrationConfig()

    def __post_init__(self):
        least = (self.warmup_steps + 1) * self.row_length * self.rows
        if self.tokens < least:
            raise InputError(
                f"tokens = {self.tokens} make {self.updates} updates, all within the {self.warmup_steps} of the warm-up: give at least {least}"
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed = {self.seed}: give one from 0 to {2**32 - 1}; JAX keeps 32 bits of it")

    @property
    def updates(self) -> int:
        return self.tokens // (self.row_length * self.rows)


def model_config(vocab_size: int) -> ModelConfig:
    """The pocket model: 0.90 M parameters, linear and full attention in turn."""
    return ModelConfig(
        vocab_size=-(-vocab_size // 16) * 16,
        hidden_size=128,
        intermediate_size=320,
        num_layers=4,
        full_attention_interval=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_positions=4096,
    )


def make_chat(directory: Path) -> Chat:
    """Writes the pocket tokenizer into `directory` and opens a chat on it."""
    tokenizer.save(tokenizer.build(vocabulary.words(), session.TOOLS), directory)
    return Chat(load_tokenizer(directory), session.TOOLS)


def make_demonstrator(config: WarmStartConfig, chat: Chat) -> Demonstrator:
    """The demonstrator over the warm start's own worlds."""

    def shops(**hazards: Any) -> list[session.Shop]:
        seeds = range(config.world_seed, config.world_seed + config.worlds)
        worlds = [synthetic.generate(synthetic.SyntheticConfig(seed=seed, split_sizes=(("train", 2400),), **hazards)) for seed in seeds]
        return [session.Shop(world, page_size=config.page_size, max_actions=config.max_actions) for world in worlds]

    return Demonstrator(shops(), shops(colour_stock=config.drill_stock, size_stock=config.drill_stock), chat, config.demonstrations)


def batches(config: WarmStartConfig, episodes: Iterator[Episode]) -> Iterator[Batch]:
    """Full rows, for ever: the longest episodes of a small pool are placed first, as `pack` does; what finds no room waits in the pool."""
    pool: list[Episode] = []
    while True:
        pool += itertools.islice(episodes, config.pool - len(pool))
        pool.sort(key=lambda e: -len(e.tokens))
        room = [config.row_length] * config.rows
        chosen: list[Episode] = []
        for episode in pool:
            row = next((r for r in range(config.rows) if len(episode.tokens) <= room[r]), None)
            if row is not None:
                room[row] -= len(episode.tokens)
                chosen.append(episode)
        kept = {id(e) for e in chosen}
        pool = [e for e in pool if id(e) not in kept]
        batch, report = pack(
            chosen, row_length=config.row_length, max_trained_per_row=config.row_length, rows_multiple_of=config.rows, aggregation="token_mean"
        )
        if report.overlong or report.num_rows != config.rows or len(pool) == config.pool:
            raise ValueError(f"the pool's episodes do not fit rows of {config.row_length} tokens: raise row_length above {len(pool[0].tokens)}")
        yield batch


def make_learner(config: WarmStartConfig, shape: ModelConfig) -> Learner:
    """The project's learner with the cross-entropy objective on one device."""
    optimizer = OptimizerConfig(
        learning_rate=config.learning_rate,
        schedule="warmup_cosine",
        warmup_steps=config.warmup_steps,
        total_steps=config.updates,
        final_ratio=0.02,
        weight_decay=config.weight_decay,
    )
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return qwen35_learner(shape, mesh, optimizer, CrossEntropy())


def train(config: WarmStartConfig, chat: Chat, shape: ModelConfig, directory: Path, progress: Progress) -> tuple[TrainState, list[dict[str, Any]]]:
    """Runs the warm start, or what is left of one that was interrupted; returns the final state and the curve.

    The position in the stream of demonstrations is a number of batches: an interrupted run draws them again, without training on them.
    """
    demonstrator = make_demonstrator(config, chat)
    learner = make_learner(config, shape)
    recipe = plain({**dataclasses.asdict(shape), **dataclasses.asdict(config)})  # flat: a refusal names the settings that differ, and no others
    with contextlib.closing(Checkpointer(directory, model_config=recipe, keep_last=1)) as checkpoints:
        if checkpoints.latest() is None:
            state, curve, done = learner.init(model.init_params(shape, jax.random.key(config.seed))), [], 0
        else:
            restored = checkpoints.restore(learner.abstract_state(model.abstract_params(shape)))
            state, curve, done = restored.state, list(restored.position["curve"]), restored.step
        logging.info("warm start: %d updates of %d x %d tokens, from update %d", config.updates, config.rows, config.row_length, done)
        progress.start("warm start", config.updates)
        progress.advance("warm start", done)
        window: list[dict[str, float]] = []
        start = time.time() - (curve[-1]["seconds"] if curve else 0)
        stream = itertools.islice(batches(config, demonstrator.stream(config.seed)), done, config.updates)
        for update, batch in enumerate(stream, done + 1):
            state, metrics = learner.update(state, [batch])
            window.append(metrics)
            if update % REPORT_EVERY == 0 or update == config.updates:
                means = {k: float(np.mean([m[k] for m in window])) for k in ("loss", "probability", "grad_norm", "learning_rate")}
                progress.advance("warm start", len(window), loss=round(means["loss"], 3))
                curve.append({"update": update, "seconds": time.time() - start, **means})
                window = []
            if update % SAVE_EVERY == 0:
                checkpoints.save(update, state, {"curve": curve})
        progress.finish("warm start")
    return state, curve


def make_checkpoint(config: WarmStartConfig, out: Path) -> None:
    """Trains and writes the checkpoint directory `out`: weights, tokenizer, and `warm_start.json` with recipe, curve and skills.

    Until it is complete everything lies in `out` + ".unfinished"; the same command goes on from there.
    """
    if out.exists():
        raise InputError(f"{out} exists already; remove it or give a new name")
    work = out.with_name(out.name + ".unfinished")
    require_disk(work, DISK)
    work.mkdir(parents=True, exist_ok=True)
    lock = take_lock(work)
    try:
        _train_and_write(config, work)
        os.rename(work / "complete", out)
        shutil.rmtree(work)
    finally:
        os.close(lock)


def _train_and_write(config: WarmStartConfig, work: Path) -> None:
    """All of `make_checkpoint` up to the directory `complete` in `work`."""
    chat = make_chat(work / "tokenizer")
    shape = model_config(chat.vocab_size)
    with Progress() as progress:
        state, curve = train(config, chat, shape, work / "training", progress)
    skills = skill_accuracy.measure(state.params, shape, chat, held_out_shop(config), episodes=ACCURACY_EPISODES, seed=config.seed)
    for kind, (accuracy, count) in skills.items():
        print(f"{kind:16s} {accuracy:.3f} of {count}")
    complete = work / "complete"
    shutil.rmtree(complete, ignore_errors=True)
    hf.save_hf(complete, shape, state.params, "float32", sorted((work / "tokenizer").iterdir()))
    record = {
        "recipe": dataclasses.asdict(config),
        "num_params": sum(int(np.prod(p.shape)) for p in jax.tree.leaves(state.params)),
        "versions": versions(),
        "skills": {kind: {"accuracy": accuracy, "count": count} for kind, (accuracy, count) in skills.items()},
        "curve": curve,
    }
    write_json(complete / "warm_start.json", record)


def held_out_shop(config: WarmStartConfig) -> session.Shop:
    """A world that neither the warm start nor a run sees: where skills are measured and recipes tuned (the dev split)."""
    world = synthetic.generate(synthetic.SyntheticConfig(seed=DEV_SEED))
    return session.Shop(world, page_size=config.page_size, max_actions=config.max_actions)
