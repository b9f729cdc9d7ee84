"""A real SGLang server with the pocket checkpoint, as a process group that ends with the test session."""

import atexit
import functools
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rollout.served import Served
from sglang_cpu import serve

from intraskill.models.qwen35 import hf
from pocket.warm_start import make_chat

CHECKPOINT = serve.ROOT / "pocket/checkpoint"
START_SECONDS = 1500  # 46 s on two idle cores
# Of log-probs, SGLang in bfloat16 and the trainer in float32 or bfloat16: on real episodes, and on random prompts, about which the
# policy knows nothing.
MEAN_ERROR, MAX_ERROR = 0.02, 0.1
RANDOM_MEAN_ERROR, RANDOM_MAX_ERROR = 0.05, 0.5


class Process:
    """The server's process group. Kept by `shared`."""

    def __init__(self, environment: Path, log: Path):
        self._environment, self._log = environment, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = serve.command(self._environment, CHECKPOINT, self.port)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, env=serve.variables(), stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.address + "/health", timeout=60) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        pytest.exit(f"SGLang did not start:\n{self._log.read_text(errors='replace')[-4000:]}", returncode=1)

    def kill(self) -> None:
        """SIGKILL to the server and all of its processes: it ends gracefully only once no request is left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @functools.cached_property
    def served(self) -> Served:
        config, params = hf.load_hf(CHECKPOINT, dtype="float32", param_dtype="float32")
        chat = make_chat(CHECKPOINT)
        return Served(self.address, config, params, 512, chat.stop_ids, chat.banned_ids(config.vocab_size), RANDOM_MEAN_ERROR, RANDOM_MAX_ERROR)


@functools.cache
def shared(environment: str) -> Process:
    """One server for all tests of this process, killed when it ends."""
    process = Process(Path(environment), Path(tempfile.mkdtemp(prefix="sglang-")) / "log")
    process.start()
    atexit.register(process.kill)
    process.wait()
    return process
