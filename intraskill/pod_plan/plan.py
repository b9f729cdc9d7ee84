"""The plan of a config on a machine: what fits, how long its work takes at the chip's best, and which setting to change."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intraskill import parts
from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import QWEN35_4B, ModelConfig
from intraskill.pod_plan import analytic, steps
from intraskill.pod_plan.steps import Memory, State, Step
from intraskill.pod_plan.topology import Topology
from intraskill.pod_plan.work import Work
from intraskill.types import InputError

STEPS = ("gradient", "log_probs", "apply", "decode")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
      topology: the machine.
      shape: of the model, and how it computes.
      source: where the shape comes from.
      settings: what the plan sets because it depends on the number of devices.
      row_length: tokens of a row; each device has one.
      trained: trained tokens of a row.
      state: of training.
      compiled: one entry per step that was asked for.
      decodes_here: whether the run decodes on these devices (`engine.kind`: embedded). Where its engines are elsewhere, the decode call is shown
        and says nothing about whether the run fits.
      analytic: whether these are calculated instead of compiled.
      model_flops: what the model asks for in a gradient step, per device.
      expected_flops: executed operations of the gradient step by formula, per device.
    """

    topology: Topology
    shape: ModelConfig
    source: str
    settings: dict[str, int]
    row_length: int
    trained: int
    state: State
    compiled: tuple[Step, ...]
    decodes_here: bool
    analytic: bool
    model_flops: float
    expected_flops: float

    def step(self, name: str) -> Step | None:
        return next((step for step in self.compiled if step.name == name), None)

    @property
    def misfits(self) -> tuple[Step, ...]:
        """Steps of the run that do not fit the device's memory."""
        return tuple(step for step in self.compiled if self._runs(step) and self._too_large(step))

    @property
    def misfits_elsewhere(self) -> tuple[Step, ...]:
        """The decode call, where it would not fit a device of this kind and the run does not need it to."""
        return tuple(step for step in self.compiled if not self._runs(step) and self._too_large(step))

    def _runs(self, step: Step) -> bool:
        return self.decodes_here or step.name != "decode"

    def _too_large(self, step: Step) -> bool:
        return step.memory is None or step.memory.peak > self.topology.chip.memory_bytes


def model_shape(config: Any, topology: Topology) -> tuple[ModelConfig, str]:
    """The model's shape, of the checkpoint or, where that directory does not exist yet, of the published 4B; and which."""
    numerics = parts.numerics(config, topology.kind)
    if topology.kind != "tpu":
        numerics["attention"] = "blocked"  # the kernel is for TPUs
    directory = Path(config.model.checkpoint)
    if directory.is_dir():
        return hf.load_config(directory, **numerics), f"{directory}"
    return dataclasses.replace(QWEN35_4B, **numerics), f"the published Qwen3.5-4B ({directory} does not exist)"


def make(config: Any, topology: Topology, wanted: Sequence[str] = STEPS) -> Plan:
    """Traces and compiles the wanted steps, one after the other. `config` is changed to suit the machine."""
    unknown = sorted(set(wanted) - set(STEPS))
    if unknown:
        raise InputError(f"steps {', '.join(unknown)} are unknown: choose of {', '.join(STEPS)}")
    shape, source = model_shape(config, topology)
    settings = steps.spread(config, topology)
    config.update_from_flattened_dict(settings)
    row, trained = config.grpo.row_length, config.grpo.trained_per_row
    found = _calculated(config, shape, topology) if topology.kind == "gpu" else _compiled(config, shape, topology, wanted)
    share = config.mesh.tensor  # devices that do a row together
    return Plan(
        topology,
        shape,
        source,
        settings,
        row,
        trained,
        *found,
        config.engine.kind == "embedded",
        topology.kind == "gpu",
        analytic.model_flops(shape, row, trained) / share,
        analytic.executed_flops(shape, row, trained) / share,
    )


def _compiled(config: Any, shape: ModelConfig, topology: Topology, wanted: Sequence[str]) -> tuple[State, tuple[Step, ...]]:
    devices = topology.devices()
    state, programs = steps.train_programs(config, shape, devices)
    # A step's arguments leave out what it does not read; that lies in the device's memory all the same.
    resident = {"gradient": state.optimizer, "log_probs": state.optimizer, "apply": 0}
    names = [name for name in STEPS if name in programs and name in wanted]
    found = [steps.compile_step(name, programs[name], topology, len(devices), resident=resident[name]) for name in names]
    if "apply" in wanted:  # no products: parameters, moments and gradient are read, the first two written
        moved = Work(bytes=2 * (state.parameters + state.optimizer) + state.gradient)
        found[names.index("apply")] = dataclasses.replace(found[names.index("apply")], work=moved)
    if "decode" in wanted:
        traced = steps.decode_program(config, shape, devices)
        found.append(steps.compile_step("decode", traced, topology, 1, while_trips=config.rollout.decode_block))
    return state, tuple(found)


def _calculated(config: Any, shape: ModelConfig, topology: Topology) -> tuple[State, tuple[Step, ...]]:
    """By formula alone, where no compiler for the machine is at hand: the gradient step only."""
    count = sum(analytic.matrices(shape)[kind] * number for kind, number in zip(("linear", "full"), analytic.num_layers(shape), strict=True))
    count += analytic.matrices(shape)["mlp"] * shape.num_layers + analytic.matrices(shape)["vocabulary"] * (1 if shape.tie_embeddings else 2)
    each = 4 * count // (config.mesh.fsdp * config.mesh.tensor)
    row, trained = config.grpo.row_length, config.grpo.trained_per_row
    flops = analytic.executed_flops(shape, row, trained) / config.mesh.tensor
    memory = Memory(2 * each, each + int(analytic.activation_bytes(shape, row, trained)) // config.mesh.tensor, 2 * each)
    fsdp = config.mesh.fsdp
    whole = (fsdp - 1) / fsdp * count / config.mesh.tensor  # entries of other devices: gathered forward and backward, their gradients sent in float32
    exchanged = {"all_gather": 2 * whole * shape.activation_dtype.itemsize, "reduce_scatter": 4 * whole}
    # Each entry is read forward, done again, and twice backward, by products of T tokens: the least that can move.
    moved = analytic.stream_bytes(shape, row) / config.mesh.tensor + sum(exchanged.values())
    return State(each, 2 * each, each), (Step("gradient", memory, Work(flops, flops, moved, exchanged)),)


def knob(plan: Plan, step: Step) -> str:
    """The setting that helps a step that does not fit."""
    most, state, shape = plan.topology.chip.memory_bytes, plan.state, plan.shape
    if step.name == "decode":
        return "lower rollout.num_slots or rollout.max_context, or serve the policy from engines on machines of their own"
    whole_state = state.parameters + state.optimizer + state.gradient
    if step.name == "apply" or whole_state > 0.8 * most:
        return "the training state alone fills the device: take a larger slice, so that mesh.fsdp cuts it into more pieces"
    if shape.remat == "none":
        return "set model.remat=layer: the backward pass then computes again what it needs instead of keeping it"
    if shape.attention == "blocked" and plan.topology.kind == "tpu":
        return "set model.attention=splash: the kernel writes no attention scores to memory"
    if not shape.piece_length:
        return "set model.piece_length, e.g. to an eighth of the row: all but attention itself then needs less at a time"
    return "lower grpo.row_length (and rollout.max_context with it), or take a larger slice, so that mesh.fsdp cuts the state into more pieces"
