"""Makes the pocket checkpoint from scripted demonstrations: 41 minutes on one CPU core that had other work too.

    python launch/warm_start.py --out=DIR [--seed=0] [--tokens=12000000]

Trains with the project's learner, prints loss as it goes and accuracy per skill at the end, and writes DIR (which must not exist) in
Hugging Face layout with the tokenizer and a report, warm_start.json. Same seed, same machine, same number of cores: same bytes,
but for the times in the report. Interrupted, the same command goes on from its last checkpoint in DIR.unfinished.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

from pathlib import Path  # noqa: E402

from absl import flags  # noqa: E402

from pocket import warm_start  # noqa: E402

_OUT = flags.DEFINE_string("out", None, "directory to write; must not exist", required=True)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the parameters and of the demonstrations")
_TOKENS = flags.DEFINE_integer("tokens", warm_start.WarmStartConfig.tokens, "tokens to train on")


def main(_) -> None:
    with entry.one_line_errors(lambda: f": the same command goes on from the last checkpoint in {Path(_OUT.value)}.unfinished"):
        warm_start.make_checkpoint(warm_start.WarmStartConfig(seed=_SEED.value, tokens=_TOKENS.value), Path(_OUT.value))


if __name__ == "__main__":
    entry.run(main)
