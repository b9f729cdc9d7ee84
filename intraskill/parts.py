"""What a run is made of, built once from its config: policy, chat, engine, learner, checkpoints, and the run's own directory.

Building checks everything that can be checked before hours are spent: the checkpoint, the tokenizer, the bank, sizes that must fit
together. Nothing here runs a stage.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from intraskill.checkpoint import Checkpointer
from intraskill.grpo.learner import Learner, OptimizerConfig, TrainState
from intraskill.grpo.loss import ClippedPolicyGradient
from intraskill.models.qwen35 import hf, model, sharding
from intraskill.models.qwen35.config import ModelConfig
from intraskill.rollout.agent import Limits
from intraskill.rollout.chat import Chat, load_tokenizer
from intraskill.rollout.collect import Rollout
from intraskill.rollout.jax_engine import JaxEngine
from intraskill.run_directory import RunDirectory
from intraskill.skills import gate, records
from intraskill.skills.analyst import RuleAnalyst
from intraskill.skills.bank import Bank
from intraskill.skills.cards import load_mechanisms
from intraskill.telemetry import Metrics, Progress
from intraskill.types import InputError, Published, Sampling, Shop, Task

# Noise streams: the same group index means different random numbers in each.
TRAIN, RETRY, VALIDATE_BARE, VALIDATE_MASKED, TEST = range(5)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy as it comes from disk: shape, parameters, and the chat of its own tokenizer."""

    config: ModelConfig
    params: Any
    chat: Chat
    sampling: Sampling


def load_policy(config: Any, tools: Sequence[Mapping[str, Any]]) -> Policy:
    """Loads `config.model.checkpoint` (HF layout) and the sampling of `config.rollout`."""
    directory = Path(config.model.checkpoint)
    shape, params = hf.load_hf(directory)
    shape = dataclasses.replace(shape, dtype=config.model.dtype, param_dtype="float32", remat=config.model.remat)
    chat = Chat(load_tokenizer(directory), tools, thinking=config.model.thinking)
    sampling = Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        stop_ids=chat.stop_ids,
        banned_ids=chat.banned_ids(shape.vocab_size),
    )
    return Policy(shape, params, chat, sampling)


def make_mesh(config: Any) -> jax.sharding.Mesh:
    """The `(data, fsdp, tensor)` mesh over the first devices."""
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    if math.prod(sizes) > jax.device_count():
        raise InputError(f"mesh {sizes} needs {math.prod(sizes)} devices, there are {jax.device_count()}: make mesh.data, fsdp or tensor smaller")
    return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), devices=jax.devices()[: math.prod(sizes)])


def make_learner(config: Any, policy: Policy, mesh: jax.sharding.Mesh) -> Learner:
    """The learner under the sampler's own temperature and banned ids."""
    shape, sampling, settings = policy.config, policy.sampling, config.grpo
    banned = jnp.zeros(shape.vocab_size, bool).at[np.array(sampling.banned_ids, np.int32)].set(True)

    def log_probs(params, batch):
        return model.log_probs(
            params,
            shape,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            batch.index,
            batch.targets,
            temperature=sampling.temperature,
            banned=banned,
        )

    return Learner(
        log_probs,
        ClippedPolicyGradient(settings.clip_low, settings.clip_high),
        OptimizerConfig(
            learning_rate=settings.learning_rate,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
        ),
        mesh=mesh,
        param_shardings=sharding.param_shardings(shape, mesh),
        decay_mask=model.decay_mask(shape),
        rows_axes=("data", "fsdp"),
    )


@dataclasses.dataclass
class Parts:
    """Everything that stages share. Values that change from step to step travel as arguments instead."""

    config: Any
    run: RunDirectory
    metrics: Metrics
    progress: Progress
    policy: Policy
    learner: Learner
    engine: JaxEngine
    shop: Shop
    shop_identity: str
    analyst: RuleAnalyst
    checkpoints: Checkpointer
    initial_bank: Bank
    general_words: frozenset[str]
    tasks: Mapping[str, Sequence[Task]]

    def rollout(self, stream: int, *, group_size: int | None = None) -> Rollout:
        """The collector's settings for one noise stream."""
        settings = self.config.rollout
        return Rollout(
            engine=self.engine,
            shop=self.shop,
            chat=self.policy.chat,
            sampling=self.policy.sampling,
            limits=Limits(settings.max_context, settings.max_steps),
            noise=(self.config.seed, stream),
            group_size=group_size or settings.group_size,
            concurrency=settings.num_slots,
            attempts=settings.attempts,
        )

    def identity(self, published: Published) -> gate.Identity:
        """What makes episodes comparable: verified weights, sampling and budgets, what spells prompts besides chunks, and the shop.

        Chunks are identified by the gate's plan, which names the hash of the bank and the candidates that hold their texts.
        """
        settings = self.config.rollout
        return gate.Identity(
            weights=published.digest,
            sampling=records.digest({**dataclasses.asdict(self.policy.sampling), "max_context": settings.max_context, "max_steps": settings.max_steps}),
            prompt=records.digest(self.policy.chat.identity),
            environment=self.shop_identity,
        )

    def abstract_state(self) -> TrainState:
        return self.learner.abstract_state(model.abstract_params(self.policy.config))


async def build(config: Any, run: RunDirectory, progress: Progress, shop: Shop, shop_identity: str) -> Parts:
    """Builds all parts; raises InputError for anything that does not fit together."""
    policy = load_policy(config, await shop.tools())
    mesh = make_mesh(config)
    learner = make_learner(config, policy, mesh)
    tasks = {split: await shop.tasks(split) for split in ("train", "validation", "test")}
    for name, wanted in (("validation", config.validation.tasks), ("test", config.test.tasks), ("train", 1)):
        if len(tasks[name]) < wanted:
            raise InputError(f"{name}.tasks = {wanted}, but the shop's split has {len(tasks[name])}: lower it or give the shop more tasks")
    bank = Bank.load(config.bank.path)
    rollout = config.rollout
    engine = JaxEngine(
        policy.config,
        policy.params,
        num_slots=rollout.num_slots,
        max_length=rollout.max_context,
        seed=config.seed,
    )
    return Parts(
        config=config,
        run=run,
        metrics=Metrics(run.path),
        progress=progress,
        policy=policy,
        learner=learner,
        engine=engine,
        shop=shop,
        shop_identity=shop_identity,
        analyst=RuleAnalyst(shop, load_mechanisms(config.bank.mechanisms)),
        checkpoints=Checkpointer(
            run.path / "checkpoints", model_config=dataclasses.asdict(policy.config), keep_last=config.checkpoint.keep
        ),
        initial_bank=bank,
        tasks=tasks,
    )


def shop_digest(settings: Mapping[str, Any]) -> str:
    """Identity of an environment from everything that decides its answers."""
    return hashlib.sha256(records.canonical(dict(settings))).hexdigest()
