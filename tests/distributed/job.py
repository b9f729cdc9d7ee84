"""Jobs of several processes on this machine."""

import dataclasses
import socket
from collections.abc import Sequence

from loop.fork_server import ForkServer, Process


def coordinator() -> str:
    """An address that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def place(address: str, num_processes: int, process_id: int) -> list[str]:
    """The flags that say which process this is."""
    return [f"--coordinator={address}", f"--num_processes={num_processes}", f"--process_id={process_id}"]


@dataclasses.dataclass
class Job:
    """The processes of one job, process 0 first."""

    processes: Sequence[Process]

    def said(self, text: str) -> list[bool]:
        """Which of them have printed `text`."""
        return [text in p.stdout for p in self.processes]

    def errors(self) -> str:
        return "\n".join(f"--- process {i}: status {p.status}\n{p.stderr[-3000:]}" for i, p in enumerate(self.processes))


def start(launcher: ForkServer, script: str, num_processes: int, *arguments: str, connections: bool = False) -> Job:
    """Starts all processes of a job; returns at once. They may note their connections."""
    address = coordinator()
    return Job([launcher.start(script, *arguments, *place(address, num_processes, i), connections=connections) for i in range(num_processes)])
