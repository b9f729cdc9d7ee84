"""Writes the report of a run: `python launch/report.py --run runs/NAME`, a few seconds, prints the path of `report/index.html`.

It works on a run at any moment; parts of the record that do not exist yet are noted in the page.
"""

import sys
from collections.abc import Sequence

from absl import app, flags

from analysis.report import write_report
from intraskill.types import InputError

RUN = flags.DEFINE_string("run", None, "Directory of the run.", required=True)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; the run is named with --run")
    try:
        print(write_report(RUN.value))
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main)
