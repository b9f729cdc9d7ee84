"""Whether W&B shows what the run logged: an export of its history against metrics.jsonl, value by value.

    python -m analysis.wandb_export runs/NAME EXPORT [--partial]

EXPORT is the run's history, the rows of `run.scan_history()`, as JSON (a list, or an object a line) or CSV; or the CSV of a panel whose x axis is
KIND/index. A panel shows some names only: --partial compares those. Values must be equal, not close: both sides hold the same doubles.
"""

import argparse
import csv
import dataclasses
import json
import math
import pathlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from analysis import frames
from intraskill.telemetry import numbers
from intraskill.types import InputError

INDEX = "index"  # KIND/index: the record's place among those of its kind
Values = dict[tuple[str, int, str], float]  # (kind, index, name) -> value


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that is not the same on both sides; None where a side lacks it."""

    kind: str
    index: int
    name: str
    logged: float | None
    exported: float | None

    def __str__(self) -> str:
        return f"{self.kind}/{self.name} of record {self.index}: logged {self.logged}, exported {self.exported}"


def compare(run: str | pathlib.Path, export: str | pathlib.Path, *, partial: bool = False) -> list[Difference]:
    """Every value that differs or that one side lacks, in the order of records; of a `partial` export only names that it has.

    Raises InputError when either cannot be read.
    """
    logged, exported = read_log(pathlib.Path(run)), read_export(pathlib.Path(export))
    if partial:
        shown = {(kind, name) for kind, _, name in exported}
        logged = {key: value for key, value in logged.items() if (key[0], key[2]) in shown}
    return [
        Difference(*key, logged.get(key), exported.get(key))
        for key in sorted(logged.keys() | exported.keys())
        if logged.get(key) != exported.get(key)
    ]


def read_log(run: pathlib.Path) -> Values:
    """The numbers of metrics.jsonl, under the names that the views show."""
    counts: Counter[str] = Counter()
    found: Values = {}
    for record in frames.read_lines(run / "metrics.jsonl"):
        kind = record["kind"]
        found |= {(kind, counts[kind], name): value for name, value in numbers(record)}
        counts[kind] += 1
    return found


def read_export(path: pathlib.Path) -> Values:
    """The numbers of an export. Where two rows have one index, which is what a resumed run leaves behind, the later one counts."""
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for row in _rows(path):
        kinds = [key.removesuffix(f"/{INDEX}") for key in row if key.endswith(f"/{INDEX}")]
        for kind in kinds:
            index = row[f"{kind}/{INDEX}"]
            if index != int(index):
                raise InputError(f"{path}: {kind}/{INDEX} is {index}, which counts no record: export the history of a run of this project")
            rows[kind, int(index)] = {k.removeprefix(f"{kind}/"): v for k, v in row.items() if k.startswith(f"{kind}/") and k != f"{kind}/{INDEX}"}
    if not rows:
        raise InputError(f"{path} has no row with a KIND/{INDEX}: export the history, or a panel whose x axis is e.g. update/{INDEX}")
    return {(kind, index, name): value for (kind, index), values in rows.items() for name, value in values.items()}


def _rows(path: pathlib.Path) -> Iterator[dict[str, float]]:
    """Each row's numbers by name; W&B's own columns (_step, _runtime, ...) and empty cells are left out."""
    for row in _raw_rows(path):
        named = {str(key).rpartition(" - ")[2]: value for key, value in row.items() if not str(key).endswith(("__MIN", "__MAX"))}
        found = {name: _number(path, name, value) for name, value in named.items() if "/" in name and not name.startswith("_")}
        yield {name: value for name, value in found.items() if value is not None}


def _raw_rows(path: pathlib.Path) -> Iterable[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{path} cannot be read ({e}): give a CSV or JSON export of the run's history") from None
    if text.lstrip()[:1] not in ("[", "{"):
        return list(csv.DictReader(text.splitlines()))
    try:
        rows = json.loads(text) if text.lstrip()[0] == "[" else [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as e:
        raise InputError(f"{path} is not JSON ({e}): give a list of rows, or one row a line") from None
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path} holds something else than rows: give a list of objects, or one object a line")
    return rows


def _number(path: pathlib.Path, name: str, value: Any) -> float | None:
    """None for what is not there: an empty cell, or a value that is not finite, which metrics.jsonl has as null."""
    if value is None or value == "" or isinstance(value, dict | list):
        return None
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"{path}: {name} is {str(value)[:40]!r}, no number: export the history of a run of this project") from None
    return number if math.isfinite(number) else None


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 when values differ, 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.wandb_export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("export", help="CSV or JSON")
    parser.add_argument("--partial", action="store_true", help="the export need not have every name")
    options = parser.parse_args(arguments)
    try:
        differences = compare(options.run, options.export, partial=options.partial)
        num_values = len(read_export(pathlib.Path(options.export)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for difference in differences:
        print(f"DIFFERS {difference}")
    print(f"{num_values} values exported, {len(differences)} differ from metrics.jsonl or are missing on one side")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
