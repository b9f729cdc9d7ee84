"""The steps of a run, traced and compiled for a machine from shapes alone: no array of the model's size is ever made."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from intraskill import parts
from intraskill.grpo.loss import DeviceBatch
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.model import abstract_params
from intraskill.models.qwen35.sharding import make_mesh
from intraskill.pod_plan import work
from intraskill.pod_plan.topology import Topology
from intraskill.rollout.scheduler import Shapes
from intraskill.rollout.slot_programs import Programs
from intraskill.types import InputError, Sampling


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a step runs.

    Attributes:
      arguments: what the step is given and gives back in place: of training, parameters, gradient and batch; of decoding, parameters and caches.
      activations: what it needs on the way, and results of their own.
      resident: what lies there meanwhile without taking part.
    """

    arguments: int
    activations: int
    resident: int = 0

    @property
    def peak(self) -> int:
        return self.arguments + self.activations + self.resident


@dataclasses.dataclass(frozen=True)
class Step:
    """One program. `memory` is None when the compiler found that it does not fit; `refused` is then its message."""

    name: str
    memory: Memory | None
    work: work.Work
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class State:
    """Bytes of the training state on one device, the largest share where shares differ."""

    parameters: int
    optimizer: int
    gradient: int


def spread(config: Any, topology: Topology) -> dict[str, int]:
    """The settings that depend on the number of devices: fsdp takes what data and tensor leave, and each device's row is one of a microbatch.

    Raises:
      InputError: a size is not positive, or data x tensor does not divide the number of devices.
    """
    sizes = {"mesh.data": config.mesh.data, "mesh.tensor": config.mesh.tensor}
    sizes |= {"grpo.row_length": config.grpo.row_length, "grpo.trained_per_row": config.grpo.trained_per_row}
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}: give a whole number >= 1")
    fixed = config.mesh.data * config.mesh.tensor
    if topology.num_devices % fixed:
        raise InputError(
            f"mesh.data x mesh.tensor = {fixed} does not divide the {topology.num_devices} devices of {topology.name}: lower one of them"
        )
    fsdp = topology.num_devices // fixed
    return {"mesh.fsdp": fsdp, "grpo.rows_per_microbatch": config.mesh.data * fsdp}


def batch_shapes(config: Any) -> DeviceBatch:
    """A microbatch of shapes."""
    settings = config.grpo
    rows, kinds = settings.rows_per_microbatch, {"mask": jnp.bool_}
    whole = {"tokens", "positions", "segment_ids"}
    integers = whole | {"index", "targets"}

    def field(name: str) -> Any:
        shape = (rows, settings.row_length if name in whole else settings.trained_per_row)
        return jax.ShapeDtypeStruct(shape, jnp.int32 if name in integers else kinds.get(name, jnp.float32))

    return DeviceBatch(*map(field, DeviceBatch._fields))


def bytes_on_device(tree: Any) -> int:
    """Of shapes with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def train_programs(config: Any, shape: ModelConfig, devices: Any) -> tuple[State, dict[str, jax.stages.Traced]]:
    """The state of training, and the programs of an update. `config` must have been given what `spread` says."""
    # Which token is banned is the tokenizer's to say; that one is, puts the ban into the program.
    sampling = Sampling(config.rollout.max_new_tokens, temperature=config.rollout.temperature, banned_ids=(0,))
    learner = parts.make_learner(config, shape, sampling, devices)
    state = learner.abstract_state(abstract_params(shape))
    parameters = bytes_on_device(state.params)
    return State(parameters, bytes_on_device(state.opt_state), parameters), learner.programs(abstract_params(shape), batch_shapes(config))


def decode_program(config: Any, shape: ModelConfig, devices: Any) -> jax.stages.Traced:
    """The embedded engine's decode call, a replica on each device: all parameters in the activation dtype, and its share of the slots.

    The layers lie apart, as `launch/serve_engine.py` loads them, whatever the trainer does.
    """
    settings, mesh = config.rollout, make_mesh(len(devices), devices=devices)
    slots = -(-settings.num_slots // len(devices))
    shape = dataclasses.replace(shape, param_dtype=shape.dtype, scan_layers=False)
    sizes = {"decode_rows": min(slots, settings.decode_rows), "decode_block": settings.decode_block}
    programs = Programs(shape, Shapes(slots, settings.max_context, num_prompts=1, **sizes))

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), tree)

    return programs.trace_decode(everywhere(abstract_params(shape)), everywhere(jax.eval_shape(programs.init_state)))


def compile_step(name: str, traced: jax.stages.Traced, topology: Topology, num_devices: int, *, resident: int = 0, while_trips: int = 1) -> Step:
    """Compiles a traced program and reads its memory; a program that the compiler refuses for its size is a result, too."""
    amount = work.of(traced, num_devices, while_trips)
    try:
        memory: Any = traced.lower().compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Step(name, None, amount, " ".join(str(error).split()))
    needed = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    if topology.kind == "tpu":
        # temp_size_in_bytes counts more than is there at any time: a program with 16.5 GiB of it compiles for a chip of 15.75. The peak is what the
        # compiler holds against the chip, up to gaps between buffers. On a CPU it leaves out buffers that results are written over.
        needed = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    return Step(name, Memory(memory.argument_size_in_bytes, needed, resident), amount)
