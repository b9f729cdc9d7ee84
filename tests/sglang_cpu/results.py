"""The table in docs/rollout.md that says what `make test-sglang` last measured, and with what."""

import datetime
import importlib.metadata
import os
import subprocess
from pathlib import Path

from rollout.served import FIGURES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/rollout.md"
BEGIN, END = "<!-- written by make test-sglang -->", "<!-- end -->"
_MEASURED = 8  # places in the tests where FIGURES gets an entry


def complete() -> bool:
    """Whether every figure was measured in this session."""
    return len(FIGURES) == _MEASURED


def _server_versions() -> str:
    names = ("sglang", "torch", "transformers", "tensorstore")
    program = f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n in {names}))"
    python = Path(os.environ["INTRASKILL_SGLANG"]) / "bin/python"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def write(num_tests: int) -> None:
    """Replaces the table between the two marks."""
    ours = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "orbax-checkpoint", "transformers"))
    rows = {
        "date": datetime.date.today().isoformat(),
        "server": _server_versions(),
        "trainer": ours,
        "tests passed": str(num_tests),
        **FIGURES,
    }
    table = "\n".join(["| what | result |", "|---|---|", *(f"| {what} | {result} |" for what, result in rows.items())])
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{DOCUMENT} has lost its marks {BEGIN!r} and {END!r}"
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
