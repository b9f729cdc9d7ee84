"""Writes the report of a run.

    python launch/report.py --run=runs/NAME

Takes seconds and prints the path of `report/index.html`. It works on a run at any moment: parts of the record that do not exist yet are noted in
the page.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # sets the environment before JAX is imported

from pathlib import Path

from absl import flags

from analysis.report import write_report
from intraskill.types import InputError

_RUN = flags.DEFINE_string("run", None, "directory of the run", required=True)


def main(_) -> None:
    with entry.one_line_errors():
        if not (Path(_RUN.value) / "config.json").is_file():
            raise InputError(f"{_RUN.value} is no run directory (no config.json): give the directory that launch/train.py wrote")
        print(write_report(_RUN.value))


if __name__ == "__main__":
    entry.run(main)
