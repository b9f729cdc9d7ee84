r"""Serves the embedded engine behind SGLang's HTTP contract, for a host without SGLang.

    python launch/serve_engine.py --checkpoint=DIR --port=30000

DIR is a Hugging Face directory; only its shape matters once a run has published weights. Says where it listens when everything is compiled
(one minute for the pocket model with an empty compilation cache); stops on Ctrl-C or SIGTERM. A run uses it with
`--config.engine.kind=sglang --config.engine.addresses="('http://HOST:30000',)"`.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

import asyncio  # noqa: E402
import signal  # noqa: E402

from absl import flags  # noqa: E402

from intraskill.models.qwen35 import hf  # noqa: E402
from intraskill.rollout import engine_server  # noqa: E402
from intraskill.rollout.jax_engine import JaxEngine  # noqa: E402
from intraskill.types import InputError  # noqa: E402

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Hugging Face directory of the model.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to bind. The service has no user accounts: keep it on a trusted network.")
_PORT = flags.DEFINE_integer("port", 30000, "Port to bind; 0 for any free one.", 0, 65535)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "What the model computes in; parameters are kept in float32.")
_SLOTS = flags.DEFINE_integer("num_slots", 64, "Episodes whose state is kept.", 1)
_ROWS = flags.DEFINE_integer("decode_rows", 32, "Episodes that are decoded together.", 1)
_LENGTH = flags.DEFINE_integer("max_length", None, "Tokens an episode may have: the run's rollout.max_context.", 2)
_SEED = flags.DEFINE_integer("seed", 0, "With a request's own seed, the source of all randomness.", 0)


async def _serve(checkpoint: str, max_length: int) -> None:
    config, params = hf.load_hf(checkpoint, dtype=_DTYPE.value, param_dtype="float32")
    sizes = {"num_slots": _SLOTS.value, "max_length": max_length, "decode_rows": min(_ROWS.value, _SLOTS.value)}
    engine = JaxEngine(config, params, seed=_SEED.value, **sizes)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await engine.warmup()  # so that no turn ever waits for a compilation
        async with engine_server.serve(engine, checkpoint, _HOST.value, _PORT.value) as address:
            print(f"engine: {checkpoint} on {address}", flush=True)
            await stop.wait()
    finally:
        await engine.close()


def main(_) -> None:
    with entry.one_line_errors():
        if _CHECKPOINT.value is None:
            raise InputError("--checkpoint is missing: give the Hugging Face directory of the model")
        if _LENGTH.value is None:
            raise InputError("--max_length is missing: give the run's rollout.max_context")
        asyncio.run(_serve(_CHECKPOINT.value, _LENGTH.value))


if __name__ == "__main__":
    entry.run(main)
