"""What a run is made of, built once from its config: policy, chat, engine, learner, checkpoints, and the run's own directory.

Building checks everything that can be checked before hours are spent: the checkpoint, the tokenizer, the bank, sizes that must fit
together. Nothing here runs a stage.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from intraskill import followers, weights
from intraskill.checkpoint import Checkpointer
from intraskill.followers import Command, Follower, Lead, LedCheckpointer, LedLearner
from intraskill.grpo.learner import Learner, OptimizerConfig, TrainState
from intraskill.grpo.loss import ClippedPolicyGradient
from intraskill.grpo.packing import Rows, pack_microbatches
from intraskill.grpo.policy import qwen35_learner
from intraskill.models.qwen35 import hf, model, sharding
from intraskill.models.qwen35.config import ModelConfig
from intraskill.profiler import Profiler
from intraskill.rollout.agent import Limits
from intraskill.rollout.chat import Chat, load_tokenizer
from intraskill.rollout.collect import Rollout
from intraskill.rollout.jax_engine import JaxEngine
from intraskill.rollout.replica import Limits as EngineLimits
from intraskill.rollout.sglang import SGLangEngine
from intraskill.run_directory import RunDirectory, read_json
from intraskill.skills import firewall, gate, records
from intraskill.skills.analyst import RuleAnalyst
from intraskill.skills.bank import Bank
from intraskill.skills.cards import Mechanisms, load_mechanisms
from intraskill.telemetry import Metrics, Progress
from intraskill.types import Engine, InputError, Published, Sampling, Shop, Task
from intraskill.wandb_run import WandbRun

# Noise streams: the same group index means different random numbers in each.
TRAIN, RETRY, VALIDATE_BARE, VALIDATE_MASKED, TEST = range(5)


REVISIONS = ("gated", "ungated", "fixed")  # who decides about the next bank; see slow_loop

# The least value of each size; what must fit together is checked in `check_settings` and where the parts are built.
ROLLOUT_SIZES = {
    "seed": 0,
    "rollout.max_new_tokens": 1,
    "rollout.max_context": 2,
    "rollout.max_steps": 1,
    "rollout.num_slots": 1,
    "rollout.decode_rows": 1,
    "rollout.decode_block": 1,
    "rollout.attempts": 1,
}
_SIZES = {
    **ROLLOUT_SIZES,
    "schedule.rounds": 1,
    "schedule.steps_per_round": 1,
    "rollout.group_size": 2,  # the advantage compares episodes of a group
    "rollout.groups_per_step": 1,
    "rollout.max_technical_in_a_row": 1,
    "grpo.updates_per_step": 1,
    "grpo.row_unit": 0,
    "grpo.fixed_length": 0,
    "analysis.max_cards": 0,
    "analysis.max_candidates": 0,
    "validation.tasks": 1,
    "validation.samples": 1,
    "test.tasks": 1,
    "test.samples": 1,
    "shop.seed": 0,
    "shop.port": 0,
    "shop.train": 1,
    "shop.validation": 1,
    "shop.test": 1,
    "bank.max_active": 0,
    "curriculum.scale": 0,
    "curriculum.withdraw_over": 0,
    "curriculum.retrieve": 0,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 0,
    "distributed.start_seconds": 1,
    "distributed.heartbeat_seconds": 1,
}


def check_sizes(config: Any, least: Mapping[str, int]) -> None:
    """Raises InputError for the first key of `least` whose value in `config` is smaller."""
    for key, smallest in least.items():
        section, _, name = key.rpartition(".")
        value = (config[section] if section else config)[name]
        if not smallest <= value < math.inf:
            raise InputError(f"{key} = {value}: must be >= {smallest}" + (" and finite" if isinstance(value, float) else ""))


def check_settings(config: Any) -> None:
    """Refuses settings of a training run that no stage could work with, before anything is built."""
    check_sizes(config, _SIZES)
    check_engine(config)
    make_objective(config)  # these two check their options
    make_optimizer(config)
    rollout, chances = config.rollout, config.curriculum
    if not config.name or "/" in config.name or config.name in (".", ".."):
        raise InputError(f"name = {config.name!r}: must be one path component; the parent directory is runs_directory")
    if "condition" in config:
        raise InputError("this config describes a test condition: run it with launch/eval.py, or train with configs/pocket.py")
    if config.shop.port > 65535:
        raise InputError(f"shop.port = {config.shop.port}: must be <= 65535; 0 takes any free one")
    if not 0 < rollout.temperature < math.inf:
        raise InputError(
            f"rollout.temperature = {rollout.temperature}: must be > 0 and finite, training needs the probabilities that were sampled from"
        )
    for small, large in (("rollout.groups_per_step", "rollout.oversample"), ("grpo.updates_per_step", "rollout.groups_per_step")):
        low, high = (config[s][n] for s, n in (small.split("."), large.split(".")))
        if low > high:
            raise InputError(f"{large} = {high} is below {small} = {low}: raise the one or lower the other")
    if not (0 <= chances.q <= 1 and 0 <= chances.rho_min <= chances.rho_max <= 1 and 0 <= chances.rho_unmeasured <= 1):
        values = ", ".join(f"{k} = {v}" for k, v in sorted(chances.items()))
        raise InputError(f"curriculum: {values}: all are probabilities, and rho_min may not exceed rho_max")
    if config.bank.max_active > gate.MAX_ACTIVE:  # the gate would say so, a round later
        raise InputError(f"bank.max_active = {config.bank.max_active}: a bank holds at most {gate.MAX_ACTIVE} chunks")
    if config.bank.revision not in REVISIONS:
        raise InputError(f"bank.revision = {config.bank.revision!r}: must be one of {', '.join(REVISIONS)}")
    if chances.retrieve and (chances.mixed or chances.withdraw_over):
        given = f"mixed = {chances.mixed}, withdraw_over = {chances.withdraw_over}"
        raise InputError(f"curriculum.retrieve = {chances.retrieve} with {given}: what is retrieved is not drawn, so choose one")
    _check_pipeline(config)


def _check_pipeline(config: Any) -> None:
    """Refuses an overlap that would train on another policy's tokens as if they were its own, and a peak that is none."""
    overlap, correction, peak = config.rollout.overlap, config.grpo.sampler_correction, config.telemetry.peak_flops
    if overlap not in (0, 1):
        raise InputError(f"rollout.overlap = {overlap}: must be 0 (on-policy) or 1 (the next step is played while one trains)")
    if overlap and correction == "none":
        raise InputError(
            "rollout.overlap = 1 with grpo.sampler_correction = 'none': overlapped tokens come from weights one step older than those that train, "
            "so set grpo.sampler_correction to truncate or mask, or rollout.overlap to 0"
        )
    if overlap and config.engine.shares_memory:
        raise InputError(
            "rollout.overlap = 1 with engine.shares_memory: a server cannot play while its memory is lent to the update; switch one of them off"
        )
    if not 0 <= peak < math.inf:
        raise InputError(f"telemetry.peak_flops = {peak}: must be the FLOP/s of one device, or 0 where it is not known")


def packing_options(config: Any) -> dict[str, Any]:
    """How episodes are packed into rows for the learner: arguments of `grpo.packing.pack_microbatches`."""
    settings = config.grpo
    return {
        "rows": Rows(settings.rows_per_microbatch, settings.row_length, settings.trained_per_row, settings.row_unit),
        "overlong": settings.overlong,
        "aggregation": settings.aggregation,
        "fixed_length": settings.fixed_length or None,
    }


def make_objective(config: Any) -> ClippedPolicyGradient:
    """The loss that `config.grpo` describes."""
    settings = config.grpo
    # As in `numerics`: a recorded run may be older than an option, and did what its default does.
    return ClippedPolicyGradient(**{f.name: settings[f.name] for f in dataclasses.fields(ClippedPolicyGradient) if f.name in settings})


def make_optimizer(config: Any) -> OptimizerConfig:
    """AdamW as `config.grpo` describes it."""
    settings, betas = config.grpo, config.grpo.betas
    if len(betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in betas):
        raise InputError(f"grpo.betas = {betas}: must be two numbers in [0, 1), e.g. (0.9, 0.98)")
    names = ("learning_rate", "weight_decay", "max_grad_norm")
    return OptimizerConfig(beta1=betas[0], beta2=betas[1], **{name: settings[name] for name in names})


AUTO = "auto"  # model.attention: the TPU kernel on TPUs, XLA's own operations elsewhere


def numerics(config: Any, platform: str = "") -> dict[str, Any]:
    """How the model computes, apart from its shape: fields of ModelConfig. Parameters that train are float32.

    Args:
      config: of the run.
      platform: what it computes on, "tpu", "gpu" or "cpu"; this process's unless given.
    """
    settings = dict(config.model)
    if settings.get("attention") == AUTO:
        settings["attention"] = "splash" if (platform or jax.default_backend()) == "tpu" else "blocked"
    names = ("dtype", "remat", "attention", "chunk_size", "piece_length", "scan_layers")
    # The config of a run that was recorded before a field existed lacks it; such a run did what the default does.
    return {"param_dtype": "float32", **{name: settings[name] for name in names if name in settings}}


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
    shape, params = _load_params(config)
    chat = Chat(load_tokenizer(directory), tools, thinking=config.model.thinking)
    sampling = Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        stop_ids=chat.stop_ids,
        banned_ids=chat.banned_ids(shape.vocab_size),
    )
    return Policy(shape, params, chat, sampling)


def _load_params(config: Any) -> tuple[ModelConfig, Any]:
    """Shape and parameters of the policy, in the host's memory where no engine of this process computes with them."""
    if config.model.attention == "splash" and jax.default_backend() != "tpu":
        raise InputError(f"model.attention = splash is a TPU kernel and this machine computes on {jax.default_backend()}: set blocked")
    try:
        device = jax.local_devices(backend="cpu")[0] if config.engine.kind == SGLANG else None
    except RuntimeError as error:
        raise InputError(f"JAX may not use this host's memory ({error}): add cpu to JAX_PLATFORMS, e.g. tpu,cpu, or unset it") from error
    with jax.default_device(device):
        return hf.load_hf(config.model.checkpoint, **numerics(config))


def make_learner(config: Any, shape: ModelConfig, sampling: Sampling, devices: Sequence[Any] | None = None) -> Learner:
    """The learner under the sampler's own temperature and banned ids, on the configured mesh over `devices`, this machine's unless given."""
    settings = config.grpo
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    if jax.process_count() > 1 and devices is None and math.prod(sizes) != jax.device_count():
        raise InputError(
            f"mesh data x fsdp x tensor = {math.prod(sizes)}, but the {jax.process_count()} processes have {jax.device_count()} devices: "
            "a mesh over several processes takes all of them"
        )
    if settings.rows_per_microbatch % (sizes[0] * sizes[1]):
        raise InputError(f"grpo.rows_per_microbatch = {settings.rows_per_microbatch} is not a multiple of mesh data x fsdp = {sizes[0] * sizes[1]}")
    return qwen35_learner(
        shape,
        sharding.make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)] if devices is None else devices),
        make_optimizer(config),
        make_objective(config),
        temperature=sampling.temperature,
        banned_ids=sampling.banned_ids,
    )


EMBEDDED, SGLANG = ENGINES = "embedded", "sglang"


def check_engine(config: Any) -> None:
    """Refuses settings of the engine that nothing could be built from."""
    settings = config.engine
    _time_limits(config)  # checks them
    if settings.kind not in ENGINES:
        raise InputError(f"engine.kind = {settings.kind!r}: choose one of {', '.join(ENGINES)}")
    if settings.kind == SGLANG and not settings.addresses:
        raise InputError("engine.addresses is empty: give the servers' addresses, e.g. --config.engine.addresses=\"('http://127.0.0.1:30000',)\"")
    if settings.shares_memory and settings.kind != SGLANG:
        raise InputError(f"engine.shares_memory with engine.kind = {settings.kind}: only SGLang servers can leave their memory to the trainer")
    for name, known in (("dtype", weights.DTYPES), ("layout", weights.LAYOUTS)):
        if settings[name] not in known:
            raise InputError(f"engine.{name} = {settings[name]!r}: choose one of {', '.join(known)}")


def _time_limits(config: Any) -> EngineLimits:
    return EngineLimits(*(config.engine[f"{name}_seconds"] for name in ("turn", "start", "load")))


def check_processes(config: Any, lead: Lead) -> None:
    """Refuses what a run of several processes cannot do."""
    if lead.num_processes > 1 and config.engine.kind == EMBEDDED:
        raise InputError(
            f"engine.kind = {EMBEDDED} with {lead.num_processes} processes: the embedded engine computes in one process only; start servers with "
            f"launch/serve_engine.py and set engine.kind = {SGLANG} and engine.addresses"
        )


def make_engine(config: Any, policy: Policy) -> JaxEngine | SGLangEngine:
    """The embedded engine, with a slot for each episode in play, or the client of the configured servers."""
    check_engine(config)
    remote, settings = config.engine, config.rollout
    if remote.kind == SGLANG:
        return SGLangEngine(list(remote.addresses), layout=remote.layout, limits=_time_limits(config))
    sizes = {"num_slots": settings.num_slots, "max_length": settings.max_context, "decode_rows": settings.decode_rows}
    return JaxEngine(policy.config, policy.params, seed=config.seed, decode_block=settings.decode_block, **sizes)


def publish(config: Any, directory: Path, version: int, shape: ModelConfig, params: Any) -> Published:
    """Publishes parameters in the form that the configured engine loads; see `weights.publish`."""
    remote = config.engine
    form = {"dtype": remote.dtype, "layout": remote.layout} if remote.kind == SGLANG else {}
    return weights.publish(directory, version, shape, params, **form)


async def serve_checkpoint(config: Any, policy: Policy, engine: JaxEngine | SGLangEngine, directory: Path) -> str:
    """Has the engine serve the policy as it came from disk, and returns the digest of what it serves."""
    if config.engine.kind == SGLANG:
        await engine.load_weights(publish(config, directory, 0, policy.config, policy.params))
    return (await engine.healthy()).digest


def make_rollout(config: Any, policy: Policy, engine: Engine, shop: Shop, stream: int, group_size: int) -> Rollout:
    """The collector's settings for one noise stream."""
    settings = config.rollout
    return Rollout(
        engine=engine,
        shop=shop,
        chat=policy.chat,
        sampling=policy.sampling,
        limits=Limits(settings.max_context, settings.max_steps),
        noise=(config.seed, stream),
        group_size=group_size,
        concurrency=settings.num_slots,
        attempts=settings.attempts,
    )


def make_identity(config: Any, policy: Policy, weights_digest: str, shop_identity: str) -> gate.Identity:
    """What makes episodes comparable: verified weights, sampling and budgets, what spells prompts besides chunks, and the shop.

    Chunks are identified by the gate's plan, which names the hash of the bank and the candidates that hold their texts.
    """
    budgets = {"max_context": config.rollout.max_context, "max_steps": config.rollout.max_steps}
    return gate.Identity(
        weights=weights_digest,
        sampling=records.digest({**dataclasses.asdict(policy.sampling), **budgets}),
        prompt=records.digest(policy.chat.identity),
        environment=shop_identity,
    )


@dataclasses.dataclass
class Parts:
    """Everything that stages share. Values that change from step to step travel as arguments instead."""

    config: Any
    run: RunDirectory
    metrics: Metrics
    progress: Progress
    profiler: Profiler
    policy: Policy
    lead: Lead
    learner: LedLearner
    reference: Any  # frozen parameters for the objective's KL term; None without one
    engine: JaxEngine | SGLangEngine
    shop: Shop
    shop_identity: str
    analyst: RuleAnalyst
    checkpoints: LedCheckpointer
    initial_bank: Bank
    general_words: frozenset[str]
    tasks: Mapping[str, Sequence[Task]]

    def rollout(self, stream: int, *, group_size: int | None = None) -> Rollout:
        """The collector's settings for one noise stream."""
        return make_rollout(self.config, self.policy, self.engine, self.shop, stream, group_size or self.config.rollout.group_size)

    def identity(self, weights_digest: str) -> gate.Identity:
        """What makes episodes comparable; see `make_identity`."""
        return make_identity(self.config, self.policy, weights_digest, self.shop_identity)

    def export(self, state: TrainState) -> Path:
        """The policy as a Hugging Face directory like the one it started from, tokenizer included: `export/` in the run."""
        directory = self.run.path / "export"
        if not directory.exists():  # it appears complete or not at all, so a resumed run need not write it twice
            hf.save_hf(directory, self.policy.config, self.lead.whole(state.params), source=self.config.model.checkpoint)
        return directory

    def engines_aside(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Around an update: engines that share the trainer's devices leave their memory to it."""
        if self.config.engine.shares_memory:
            assert isinstance(self.engine, SGLangEngine)  # see `check_engine`
            return self.engine.lending_memory()
        return contextlib.nullcontext()

    async def close(self) -> None:
        """Lets go of the engine and closes the files."""
        await self.engine.close()
        self.profiler.close()
        self.checkpoints.close()
        self.metrics.close()

    def abstract_state(self) -> TrainState:
        return self.learner.abstract_state(model.abstract_params(self.policy.config))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run is given and what is made from it, read and checked before its directory exists."""

    policy: Policy
    learner: Learner
    engine: JaxEngine | SGLangEngine
    bank: Bank
    mechanisms: Mechanisms
    tasks: Mapping[str, Sequence[Task]]


async def load(config: Any, shop: Shop) -> Inputs:
    """Reads policy, bank, mechanisms and task lists; raises InputError for what is broken or does not fit together."""
    policy = load_policy(config, await shop.tools())
    tasks = {split: await shop.tasks(split) for split in ("train", "validation", "test")}
    for name, wanted in (("validation", config.validation.tasks), ("test", config.test.tasks), ("train", 1)):
        if len(tasks[name]) < wanted:
            raise InputError(f"{name}.tasks = {wanted}, but the shop's split has {len(tasks[name])}: lower it or give the shop more tasks")
    bank, mechanisms = Bank.load(config.bank.path), load_mechanisms(config.bank.mechanisms)
    options = packing_options(config)
    pack_microbatches([], **options)  # checks them
    for length, _ in options["rows"].shapes:
        model.check_row(policy.config, length)
    return Inputs(policy, make_learner(config, policy.config, policy.sampling), make_engine(config, policy), bank, mechanisms, tasks)


def make_checkpointer(config: Any, run: Path, shape: ModelConfig) -> Checkpointer:
    """The run's checkpoints. Where there are several processes, each has to call this, once the run's directory is there."""
    settings, directory = config.checkpoint, run / "checkpoints"
    return Checkpointer(directory, model_config=dataclasses.asdict(shape), keep_last=settings.keep, keep_every=settings.keep_every or None)


def build(
    config: Any,
    inputs: Inputs,
    run: RunDirectory,
    progress: Progress,
    shop: Shop,
    shop_identity: str,
    lead: Lead,
    *,
    wandb: bool = False,
    profile: range = range(0),
) -> Parts:
    """Builds analyst and records around `inputs`, and has the other processes build what they need.

    `wandb` and `profile`, steps to record, are how this process is watched and no part of the run.
    """
    policy = inputs.policy
    lead.prepare(config, policy.params, {"run": str(run.path), "banned_ids": list(policy.sampling.banned_ids)})
    learner, checkpoints = LedLearner(lead, inputs.learner), LedCheckpointer(lead, make_checkpointer(config, run.path, policy.config))
    wordings = [text for options in inputs.mechanisms.values() for wording in options for text in wording.texts]
    return Parts(
        config=config,
        run=run,
        metrics=Metrics(run.path, WandbRun(run.path, run.config) if wandb else None),
        progress=progress,
        profiler=Profiler(run.path / "profile", profile),
        policy=policy,
        lead=lead,
        learner=learner,
        reference=learner.reference(policy.params) if config.grpo.kl_coefficient > 0 else None,
        engine=inputs.engine,
        shop=shop,
        shop_identity=shop_identity,
        analyst=RuleAnalyst(shop, inputs.mechanisms),
        checkpoints=checkpoints,
        initial_bank=inputs.bank,
        general_words=firewall.vocabulary([*wordings, *(chunk.text for chunk in inputs.bank.chunks)]),
        tasks=inputs.tasks,
    )


def follow(config: Any, follower: Follower) -> None:
    """All that a process other than the first does in a run: it reads the policy, and makes the calls that process 0 makes."""
    shape, params = _load_params(config)
    command, told, _ = follower.receive()
    if command != Command.PREPARE:  # process 0 ended before it came so far
        return
    followers.require_same(told, config, params)
    sampling = Sampling(1, temperature=config.rollout.temperature, banned_ids=tuple(told["banned_ids"]))
    checkpoints = make_checkpointer(config, Path(told["run"]), shape)
    followers.follow(follower, make_learner(config, shape, sampling), checkpoints, params)


def export_run(run: Path, directory: Path, dtype: str | None) -> int:
    """Exports a run's newest checkpoint; returns its step. Raises InputError when there is none."""
    path = run / "config.json"
    if not path.is_file():
        raise InputError(f"{run} is no run directory (no config.json): give the directory that launch/train.py wrote")
    if not (run / "checkpoints").is_dir():
        raise InputError(f"{run} has no checkpoints yet: let the run finish its first step")
    config: Any = ConfigDict(read_json(path))
    source = Path(config.model.checkpoint)
    shape = hf.load_config(source, **numerics(config))
    checkpoints = Checkpointer(run / "checkpoints", model_config=dataclasses.asdict(shape), read_only=True)
    try:
        restored = checkpoints.restore(make_learner(config, shape, Sampling(1)).abstract_state(model.abstract_params(shape)))
    finally:
        checkpoints.close()
    hf.save_hf(directory, shape, restored.state.params, dtype, source=source)
    return restored.step
