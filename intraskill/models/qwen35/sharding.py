"""Where parameters live on a (data, fsdp, tensor) mesh: one table from logical axes to mesh axes.

`data` replicates parameters, `fsdp` cuts the model dimension (and the vocabulary) for storage, `tensor` cuts heads, MLP width and
vocabulary. Linear-attention parameters carry an axis of key heads, so cutting by `tensor` gives each device whole heads with their values.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.params import Params, abstract_params, logical_axes
from intraskill.types import InputError

MESH_AXES = ("data", "fsdp", "tensor")

RULES: dict[str | None, str | None] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
    "blocks": None,
    None: None,
}

ROWS = PartitionSpec(("data", "fsdp"))
"""Rows of a batch are spread over every device that does not share a row's work by `tensor`."""


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the given devices (all of them unless given)."""
    devices = jax.devices() if devices is None else devices
    if data * fsdp * tensor != len(devices):
        raise InputError(f"mesh data={data} fsdp={fsdp} tensor={tensor} needs {data * fsdp * tensor} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices).reshape(data, fsdp, tensor), MESH_AXES)


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    return PartitionSpec(*(RULES[axis] for axis in axes))


def param_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """A `NamedSharding` for each parameter.

    Raises:
      InputError: a mesh axis does not divide a dimension that it cuts.
    """

    def sharding(axes: tuple[str | None, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = partition_spec(axes)
        for axis, mesh_axis, size in zip(axes, spec, leaf.shape, strict=True):
            if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                raise InputError(f"mesh axis {mesh_axis}={mesh.shape[mesh_axis]} does not divide {axis}={size} of the model; choose a divisor")
        return NamedSharding(mesh, spec)

    return jax.tree.map(sharding, logical_axes(config), abstract_params(config), is_leaf=lambda x: isinstance(x, tuple))
