"""Writes a run's newest checkpoint as a Hugging Face directory, tokenizer included, that transformers and SGLang load.

python launch/export_hf.py --run=runs/NAME --out=DIR [--dtype=bfloat16]
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

from pathlib import Path  # noqa: E402

from absl import flags  # noqa: E402

from intraskill import parts  # noqa: E402

_RUN = flags.DEFINE_string("run", None, "run directory", required=True)
_OUT = flags.DEFINE_string("out", None, "directory to write; must not exist", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of the weights on disk")


def main(_) -> None:
    with entry.one_line_errors():
        step = parts.export_run(Path(_RUN.value), Path(_OUT.value), _DTYPE.value)
        print(f"{_OUT.value}: step {step} of {_RUN.value}")


if __name__ == "__main__":
    entry.run(main)
