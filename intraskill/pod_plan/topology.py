"""The machines that a plan can be made for, and their devices as the compiler sees them.

A TPU slice is described by the compiler's own library (`libtpu`), which needs no TPU to compile for one.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from intraskill.types import InputError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, by its maker's data sheet.

    Attributes:
      memory_bytes: of the device.
      flops: bfloat16 multiplications and additions a second; None where no figure is published.
      memory_rate: bytes a second between the device and its memory.
      link_rate: bytes a second that a device can send to its neighbours, all links together.
    """

    memory_bytes: int
    flops: float | None
    memory_rate: float | None
    link_rate: float | None


CHIPS = {
    "v5e": Chip(16 * GIB, 197e12, 819e9, 200e9),
    "v5p": Chip(95 * GIB, 459e12, 2765e9, 600e9),
    "v6e": Chip(32 * GIB, 918e12, 1638e9, 448e9),
    "h100": Chip(80 * 10**9, 989e12, 3350e9, 450e9),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine.

    Attributes:
      name: as given, e.g. "v5p:2x2x2".
      kind: "tpu" and "cpu" are compiled for, "gpu" is calculated only.
      num_devices: of the machine.
      chip: one of them.
    """

    name: str
    kind: str
    num_devices: int
    chip: Chip

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Reads KIND:SIZE. Raises InputError for anything else."""
        match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name)
        if match is None or match[1] not in (*CHIPS, "cpu"):
            raise InputError(f"topology is {name!r}: give v5p:2x2x2, v6e:4x4, v5e:4x8 or another slice of these chips, cpu:8 or h100:8")
        kind, sizes = match[1], [int(size) for size in match[2].split("x")]
        dimensions = {"v5p": 3, "v5e": 2, "v6e": 2}.get(kind, 1)
        if len(sizes) != dimensions:
            raise InputError(f"topology is {name!r}: {kind} takes {dimensions} sizes, as in {kind}:{'x'.join('2' * dimensions)}")
        count = 1
        for size in sizes:
            count *= size
        if kind == "cpu":
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
            return cls(name, "cpu", count, Chip(memory, None, None, None))
        return cls(name, "gpu" if kind == "h100" else "tpu", count, CHIPS[kind])

    def prepare(self) -> None:
        """Settings of JAX and of the compiler. Call before anything asks JAX for its devices."""
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # a program read back from the cache does not know its memory
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no TPU whose metadata could be asked for
        if self.kind == "cpu":
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self.num_devices}".strip()

    def devices(self) -> Sequence[Any]:
        """The devices to compile for."""
        if self.kind == "cpu":
            devices = jax.devices("cpu")[: self.num_devices]
            if len(devices) < self.num_devices:
                raise InputError(f"topology is {self.name}: JAX was started with {len(devices)} devices; make the plan in a process of its own")
            return devices
        from jax.experimental import topologies

        try:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=self.name).devices
        except Exception as error:  # the library answers with errors of several kinds
            raise InputError(f"topology {self.name} cannot be described: {error}; it takes the package libtpu: pip install '.[plan]'") from error
        if len(devices) != self.num_devices:
            raise InputError(f"topology {self.name} has {len(devices)} devices by the compiler and {self.num_devices} by its name")
        return devices
