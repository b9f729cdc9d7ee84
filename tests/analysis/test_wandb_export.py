"""An export of W&B's history against the local log: what is equal, what differs, what is missing, and what is no export."""

import csv
import json

import pytest

from analysis import wandb_export
from analysis.wandb_export import Difference, compare, main
from intraskill.telemetry import Metrics

RECORDS = [
    {"kind": "rollout", "round": 0, "step": 0, "reward": 0.1, "inclusion": {"a@1": 1 / 3}},
    {"kind": "update", "round": 0, "step": 0, "loss": 0.2, "grad_norm": float("nan")},
    {"kind": "update", "round": 0, "step": 0, "loss": -0.30000000000000004, "grad_norm": 7},
]
# By hand: a row a record, as `run.log` was given it. What is not finite was never logged.
ROWS = [
    {"_step": 0, "_runtime": 1.5, "rollout/index": 0, "rollout/round": 0.0, "rollout/reward": 0.1, "rollout/inclusion/a@1": 0.3333333333333333},
    {"_step": 1, "_runtime": 2.5, "update/index": 0, "update/round": 0.0, "update/loss": 0.2},
    {"_step": 2, "_runtime": 3.5, "update/index": 1, "update/round": 0.0, "update/loss": -0.30000000000000004, "update/grad_norm": 7.0},
]


@pytest.fixture
def run(tmp_path):
    with Metrics(tmp_path / "run") as metrics:
        metrics.write(*RECORDS)
    return tmp_path / "run"


def as_list(path, rows):
    path.write_text(json.dumps(rows))


def as_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)


FORMATS = [as_list, as_lines, as_csv]


def changed(row, **values):
    return [{**r, **{k.replace("__", "/"): v for k, v in values.items()}} if i == row else r for i, r in enumerate(ROWS)]


@pytest.mark.parametrize("write", FORMATS)
def test_a_faithful_export_has_no_difference(run, tmp_path, write, capsys):
    write(tmp_path / "export", ROWS)
    assert compare(run, tmp_path / "export") == []
    assert main([str(run), str(tmp_path / "export")]) == 0
    assert capsys.readouterr().out == "8 values exported, 0 differ from metrics.jsonl or are missing on one side\n"


@pytest.mark.parametrize("write", FORMATS)
def test_one_differing_value_is_found_and_named(run, tmp_path, write, capsys):
    write(tmp_path / "export", changed(2, update__loss=-0.3))  # the last of 53 bits
    assert compare(run, tmp_path / "export") == [Difference("update", 1, "loss", -0.30000000000000004, -0.3)]
    assert main([str(run), str(tmp_path / "export")]) == 1
    assert capsys.readouterr().out.startswith("DIFFERS update/loss of record 1: logged -0.30000000000000004, exported -0.3\n")


@pytest.mark.parametrize("write", FORMATS)
def test_what_one_side_lacks_is_a_difference(run, tmp_path, write):
    write(tmp_path / "export", [*ROWS[:2], {"_step": 9, "update/index": 2, "update/loss": 5.0}])
    assert compare(run, tmp_path / "export") == [
        Difference("update", 1, "grad_norm", 7, None),
        Difference("update", 1, "loss", -0.30000000000000004, None),
        Difference("update", 1, "round", 0, None),
        Difference("update", 2, "loss", None, 5.0),
    ]


@pytest.mark.parametrize("write", FORMATS)
def test_of_what_was_played_again_the_later_row_counts(run, tmp_path, write):
    write(tmp_path / "export", [changed(1, update__loss=9.0)[1], *ROWS])
    assert compare(run, tmp_path / "export") == []


def test_a_panel_shows_some_names_under_the_run_s(run, tmp_path):
    path = tmp_path / "panel.csv"
    path.write_text('"update/index","run - update/loss","run - update/loss__MIN","run - update/loss__MAX"\n"0","0.2","0","1"\n"1","0.5","0","1"\n')
    assert compare(run, path, partial=True) == [Difference("update", 1, "loss", -0.30000000000000004, 0.5)]
    assert len(compare(run, path)) == 1 + 3 + 3  # a panel is no whole history: two rounds, a norm, and the rollout's three values
    path.write_text(path.read_text().replace("update/index", "Step"))
    with pytest.raises(wandb_export.InputError, match="x axis"):
        compare(run, path, partial=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("", "no row with a KIND/index"),
        ("[{]", "is not JSON"),
        ("[1]", "something else than rows"),
        ('[{"update/index": 0.5}]', "counts no record"),
        ("update/index,update/loss\n0,much\n", "'much', no number"),
    ],
)
def test_what_is_no_export_is_refused_in_one_line(run, tmp_path, text, words, capsys):
    if text is not None:
        (tmp_path / "export").write_text(text)
    assert main([str(run), str(tmp_path / "export")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
