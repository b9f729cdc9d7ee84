"""Imports a Hugging Face checkpoint of Qwen3.5 as Orbax: parameters in this project's layout, everything else as it was published.

    python launch/import_hf.py --checkpoint=DIR --out=DIR

The result can be given wherever a checkpoint is asked for (`--config.model.checkpoint`), and `launch/export_hf.py --imported` turns it back, bit for
bit. See docs/hf.md.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

from absl import flags  # noqa: E402

from intraskill.models.qwen35 import hf  # noqa: E402

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Hugging Face directory, text-only or multimodal", required=True)
_OUT = flags.DEFINE_string("out", None, "directory to write; must not exist", required=True)


def main(_) -> None:
    with entry.one_line_errors():
        hf.import_hf(_CHECKPOINT.value, _OUT.value)
        print(f"{_OUT.value}: imported {_CHECKPOINT.value}")


if __name__ == "__main__":
    entry.run(main)
