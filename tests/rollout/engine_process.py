"""Engine servers as processes of their own."""

from pathlib import Path

from loop.fork_server import ForkServer, Process


def start(launcher: ForkServer, checkpoint: Path, max_length: int, slots: int, port: int = 0) -> tuple[Process, str]:
    """A server that answers, and its address."""
    sizes = (f"--num_slots={slots}", f"--decode_rows={slots}", f"--max_length={max_length}", "--dtype=float32")
    process = launcher.start("launch/serve_engine.py", f"--checkpoint={checkpoint}", f"--port={port}", *sizes)
    said = process.directory / "stdout"
    process.wait_until(lambda: said.exists() and said.read_text().endswith("\n"))
    assert process.status is None, process.stderr
    return process, process.stdout.split(" on ")[1].strip()
