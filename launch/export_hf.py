"""Writes a run's newest checkpoint, or an imported directory, as a Hugging Face directory that transformers and SGLang load.

    python launch/export_hf.py --run=runs/NAME --out=DIR [--dtype=bfloat16]
    python launch/export_hf.py --imported=DIR --out=DIR [--dtype=bfloat16]

Architecture, config.json, tokenizer and the tensors of other towers are those of the checkpoint that the run started from. See docs/hf.md.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

import logging  # noqa: E402
from pathlib import Path  # noqa: E402

from absl import flags  # noqa: E402

from intraskill.models.qwen35 import hf  # noqa: E402

_RUN = flags.DEFINE_string("run", None, "run directory")
_IMPORTED = flags.DEFINE_string("imported", None, "directory that launch/import_hf.py wrote")
_OUT = flags.DEFINE_string("out", None, "directory to write; must not exist", required=True)
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "dtype of the text tower's weights on disk; as published unless given")
flags.mark_flags_as_mutual_exclusive(["run", "imported"], required=True)


def _worth_saying(record: logging.LogRecord) -> bool:
    """Orbax warns that a directory opened read-only is read-only. That is intended, and nobody who exports could change it."""
    return not (record.module == "checkpoint_manager" and ("read_only" in record.getMessage() or "read only" in record.getMessage()))


def main(_) -> None:
    logging.getLogger("absl").addFilter(_worth_saying)
    with entry.one_line_errors():
        if _IMPORTED.value is not None:
            hf.export_imported(_IMPORTED.value, _OUT.value, _DTYPE.value)
            print(f"{_OUT.value}: {_IMPORTED.value}")
        else:
            from intraskill import parts  # with all that a run is made of; an import needs none of it

            step = parts.export_run(Path(str(_RUN.value)), Path(_OUT.value), _DTYPE.value)
            print(f"{_OUT.value}: step {step} of {_RUN.value}")
        if (Path(_OUT.value) / hf.MTP_NOTE).exists():
            print("its multi-token prediction tensors are those of the original checkpoint, and stale: the text tower has been trained since")


if __name__ == "__main__":
    entry.run(main)
