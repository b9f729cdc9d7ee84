"""Fair timing of several sides on one machine: warm-up, then all sides in turn, round after round; medians of wall and CPU seconds."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over the rounds, in seconds; CPU seconds are those of all threads of this process."""

    wall: float
    cpu: float


def measure(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Calls each side once to warm up, then `rounds` times in turn. A side must have finished its work when it returns."""
    for side in sides.values():
        side()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            side()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Timing(*(statistics.median(values) for values in zip(*times, strict=True))) for name, times in found.items()}


def verdict(name: str, ratios: Mapping[str, tuple[float, float, bool]]) -> int:
    """Prints the last line of a benchmark from {figure: (value, target, whether more is better)}; 0 when all are met, 1 when not."""
    met = all(value >= target if more else value <= target for value, target, more in ratios.values())
    values = "/".join(f"{value:.4g}" for value, _, _ in ratios.values())
    targets = "/".join(f"{'>=' if more else '<='}{target:g}" for _, target, more in ratios.values())
    print(f"{name} ({', '.join(ratios)}) ratio={values} target={targets} {'met' if met else 'missed'}")
    return 0 if met else 1
