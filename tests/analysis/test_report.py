import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from analysis import report
from intraskill.types import InputError
from tests.analysis.runs import write_run

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def page(run):
    return report.write_report(run).read_text()


class Checker(html.parser.HTMLParser):
    """Collects ids, references and loadable addresses, and checks that tags nest."""

    VOID = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.loads, self.svgs, self.scripts = [], [], [], 0, 0

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.svgs += tag == "svg"
        self.scripts += tag == "script"
        self.ids += [v for k, v in attrs if k == "id"]
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and checker.scripts == 0 and checker.loads == []
    assert "://" not in page and "@import" not in page
    assert len(set(checker.ids)) == len(checker.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(checker.ids)
    assert checker.svgs == 10 and "Not shown" not in page


def test_the_page_shows_the_numbers(page):
    for part in ("final − base", "round001-bare − base-validation", "budget@1", "lost to another version", "retired", "round 1", "75.0%"):
        assert part in page, part
    assert "budget &lt;1&gt;" in page and "budget <1>" not in page


def test_each_missing_part_is_a_note_and_no_more(run, tmp_path):
    copy = tmp_path / "small"
    for name, num_notes in (("summary.json", 1), ("metrics.jsonl", 2), ("eval", 1), ("versions.json", 1), ("rounds", 3)):
        shutil.copytree(run, copy)
        shutil.rmtree(copy / name) if (copy / name).is_dir() else (copy / name).unlink()
        assert report.write_report(copy).read_text().count("Not shown:") == num_notes, name
        shutil.rmtree(copy)


def test_an_edited_gate_is_noticed(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "small")
    path = copy / "rounds" / "000" / "gate.json"
    record = json.loads(path.read_text())
    record["content"]["decisions"][0]["coefficient"] = 1.0
    path.write_text(json.dumps(record))
    assert "was edited" in report.write_report(copy).read_text()


def test_an_incomplete_gate_is_said_to_be(run, tmp_path):
    from intraskill.skills import records

    copy = shutil.copytree(run, tmp_path / "small")
    path = copy / "rounds" / "001" / "gate.json"
    record = records.read(path, "gate")
    content = {**record.content, "status": "incomplete", "problems": ["x", "y"], "decisions": [], "selected": []}
    records.write(path, records.Record("gate", content, record.inputs))
    page = report.write_report(copy).read_text()
    assert "gate of round 1 is incomplete (2 problems)" in page and "undecided" in page


def test_a_run_of_nothing_is_a_page_of_notes(tmp_path):
    page = report.write_report(tmp_path).read_text()
    assert page.count("Not shown:") == len(report.SECTIONS)
    with pytest.raises(InputError, match="is not a directory"):
        report.write_report(tmp_path / "absent")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.123456, "0.1235"),
        (3.0, "3"),
        (1.0, "1"),
        (True, "True"),
        ("<a>", "<a>"),
        (1e-9, "1e-09"),
        ([], "–"),
        ({"a": 0.5, "b": ["x", "y"]}, "a 0.5, b x, y"),
    ],
)
def test_cells(value, text):
    assert report.cell(value) == text


def test_tables_escape_and_align():
    text = report.table(pd.DataFrame({"the_name": ["<b>"], "x": [0.5]}))
    assert "<th>the name</th>" in text and "<td>&lt;b&gt;</td>" in text and '<td class="number">0.5</td>' in text


def test_the_command(run, tmp_path):
    command = [sys.executable, "launch/report.py", "--run"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    good = subprocess.run([*command, str(run)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert good.returncode == 0 and good.stdout.strip() == str(run / "report" / "index.html")
    bad = subprocess.run([*command, str(tmp_path / "absent")], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert bad.returncode == 2 and re.fullmatch(r"error: .*absent is no run directory .*\n", bad.stderr)
