"""How much work a traced program is: operations, bytes moved, bytes exchanged, per device.

XLA's own count takes the body of a loop once and a kernel not at all, and the text of a compiled TPU program cannot be had for every chip. The
program that JAX traced has everything: trip counts of scans, the kernels' own programs, and, since parameters are exchanged by hand
(`models.qwen35.fsdp`), every large exchange.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from intraskill.models.qwen35 import splash

# A float32 product on a unit that multiplies bfloat16 takes this many passes.
_PASSES = {lax.Precision.HIGHEST: 6, lax.Precision.HIGH: 3, lax.Precision.DEFAULT: 1}
_MOVES = ("gather", "scatter", "scatter-add", "dynamic_update_slice")


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does.

    Attributes:
      flops: multiplications and additions of matrix products.
      bf16_flops: the same, each as often as a bfloat16 unit has to pass over it.
      bytes: operands and results of products, kernels, gathers, scatters and exchanges: what moves when everything else is fused into them.
      exchanged: bytes that a device sends, by kind of exchange.
    """

    flops: float = 0.0
    bf16_flops: float = 0.0
    bytes: float = 0.0
    exchanged: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Work") -> "Work":
        kinds = {*self.exchanged, *other.exchanged}
        exchanged = {kind: self.exchanged.get(kind, 0.0) + other.exchanged.get(kind, 0.0) for kind in sorted(kinds)}
        return Work(self.flops + other.flops, self.bf16_flops + other.bf16_flops, self.bytes + other.bytes, exchanged)

    def __mul__(self, times: float) -> "Work":
        exchanged = {kind: amount * times for kind, amount in self.exchanged.items()}
        return Work(self.flops * times, self.bf16_flops * times, self.bytes * times, exchanged)


def of(traced: Any, num_devices: int, while_trips: int = 1) -> Work:
    """The work of a traced program on one of `num_devices`, over which what is not divided explicitly is spread evenly.

    Args:
      traced: `jax.jit(f).trace(...)`.
      num_devices: of the mesh.
      while_trips: how often the bodies of loops without a fixed count run.
    """
    jaxpr = traced.jaxpr.jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # differentiation leaves products whose results nobody reads
    return _count(live, 1 / num_devices, {}, while_trips)


def _count(jaxpr: core.Jaxpr, share: float, axes: Mapping[str, int], trips: int) -> Work:
    total = Work()
    for eqn in jaxpr.eqns:
        total += _one(eqn, share, axes, trips)
    return total


def _one(eqn: Any, share: float, axes: Mapping[str, int], trips: int) -> Work:
    name = eqn.primitive.name
    if name == "dot_general":
        return _product(eqn) * share
    if name == "pallas_call":
        return _kernel(eqn, trips) * share
    if name == "shard_map":
        return _count(eqn.params["jaxpr"], 1.0, dict(eqn.params["mesh"].shape), trips)
    if name == "scan":
        return _count(eqn.params["jaxpr"].jaxpr, share, axes, trips) * eqn.params["length"]
    if name == "while":
        return _count(eqn.params["body_jaxpr"].jaxpr, share, axes, trips) * trips
    if name == "cond":
        return max((_count(branch.jaxpr, share, axes, trips) for branch in eqn.params["branches"]), key=lambda work: work.flops)
    if name in _MOVES:
        return Work(bytes=2 * sum(map(_size, eqn.outvars)) * share) if name == "gather" else Work(bytes=2 * _size(eqn.invars[-1]) * share)
    if "axis_name" in eqn.params or "axes" in eqn.params:
        exchange = _exchange(eqn, axes)
        if exchange is not None:
            return exchange * share
    total = Work()
    for inner in _inner(eqn.params):
        total += _count(inner, share, axes, trips)
    return total


def _inner(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize


def _product(eqn: Any) -> Work:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval
    flops = 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left.shape[d] for d in contracted)
    precision = eqn.params["precision"]
    exact = precision[0] if isinstance(precision, tuple) else precision
    passes = _PASSES[exact or lax.Precision.DEFAULT] if left.dtype.itemsize > 2 else 1
    return Work(flops, flops * passes, sum(map(_size, (*eqn.invars, *eqn.outvars))))


def _kernel(eqn: Any, trips: int) -> Work:
    """The attention kernel: its program for one tile, times the tiles that the causal mask leaves."""
    if not str(eqn.params["name"]).startswith("splash"):
        raise NotImplementedError(f"no count for the kernel {eqn.params['name']}")
    grid = eqn.params["grid_mapping"].grid
    length = max(variable.aval.shape[-2] for variable in eqn.outvars if variable.aval.ndim >= 3)
    side = length // splash.tile(length)
    tile = _count(eqn.params["jaxpr"], 1.0, {}, trips)
    moved = sum(map(_size, (*eqn.invars, *eqn.outvars)))
    return dataclasses.replace(tile * (math.prod(grid) * splash.tiles_computed(length) / side**2), bytes=moved)


def _exchange(eqn: Any, axes: Mapping[str, int]) -> Work | None:
    """Bytes that a device sends when each exchange goes round a ring; None for what exchanges nothing, such as a device asking for its place."""
    names = eqn.params.get("axis_name", eqn.params.get("axes"))
    names = names if isinstance(names, tuple) else (names,)
    size = math.prod(axes.get(name, 1) for name in names if isinstance(name, str))
    part = (size - 1) / size
    given, result = sum(map(_size, eqn.invars)), sum(map(_size, eqn.outvars))
    kinds = {
        "all_gather": result,
        "reduce_scatter": given,
        "all_to_all": given,
        "psum": 2 * given,
        "psum_invariant": 2 * given,
        "pmax": 2 * given,
    }
    name = eqn.primitive.name
    if name not in kinds:
        return None
    if size == 1:
        return Work()
    kind = "all_reduce" if name.startswith("p") else name
    return Work(bytes=given + result, exchanged={kind: kinds[name] * part})
