"""One static page about a run: charts as inline SVG with the numbers in tables below them, no script, nothing fetched.

Whatever part of the record is absent or damaged leaves a note where its section would be, so a report can be made of a run at any moment, also of
one that was cut short.
"""

import dataclasses
import html
import io
import os
import pathlib
import re
from collections.abc import Callable

import altair as alt
import pandas as pd

from analysis import figures, frames
from intraskill.run_directory import read_json, write_text
from intraskill.types import InputError

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; border-top: 1px solid #ddd; padding-top: 1rem; }
p.about { color: #4a4a4a; margin: .2rem 0 1rem; } figure { margin: 1rem 0; overflow-x: auto; } figcaption { color: #4a4a4a; font-size: .87rem; }
svg { max-width: 100%; height: auto; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
td.number, th.number { text-align: right; }
details { margin: .4rem 0; } summary { cursor: pointer; color: #004f7c; }
pre { font-size: .8rem; overflow-x: auto; background: #f6f6f6; padding: .7rem; }
p.note { background: #fff4d6; border-left: 4px solid #b98300; padding: .5rem .8rem; }
nav a { margin-right: 1rem; }
"""


@dataclasses.dataclass
class Section:
    """What one section shows: HTML parts in order."""

    parts: list[str] = dataclasses.field(default_factory=list)

    def figure(self, chart: alt.TopLevelMixin, name: str, caption: str) -> None:
        self.parts.append(f"<figure>{svg(chart, name)}<figcaption>{html.escape(caption)}</figcaption></figure>")

    def table(self, rows: pd.DataFrame, title: str = "", *, folded: bool = False) -> None:
        body = f'<div class="wide">{table(rows)}</div>'
        self.parts.append(f"<details><summary>{html.escape(title)}</summary>{body}</details>" if folded else body)

    def note(self, text: str) -> None:
        self.parts.append(f'<p class="note">{html.escape(text)}</p>')


def write_report(run: str | os.PathLike[str]) -> pathlib.Path:
    """Writes `report/index.html` in the run's directory and returns its path."""
    run = pathlib.Path(run)
    if not run.is_dir():
        raise InputError(f"{run} is not a directory; give the directory of a run")
    path = run / "report" / "index.html"
    write_text(path, page(run))
    return path


def page(run: pathlib.Path) -> str:
    """The whole page."""
    bodies, links = [], []
    for title, about, build in SECTIONS:
        section, anchor = Section(), re.sub(r"\W+", "-", title.lower())
        try:
            build(run, section)
        except InputError as e:
            section.note(f"Not shown: {e}")
        except (KeyError, TypeError, IndexError) as e:  # a record of another version, or edited by hand
            section.note(f"Not shown: a record of this section lacks what it should hold ({type(e).__name__}: {e})")
        links.append(f'<a href="#{anchor}">{html.escape(title)}</a>')
        bodies.append(f'<h2 id="{anchor}">{html.escape(title)}</h2>\n<p class="about">{html.escape(about)}</p>\n' + "\n".join(section.parts))
    name = html.escape(run.resolve().name)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}</title><style>{STYLE}</style>'
    body = f"<h1>{name}</h1>\n<nav>{''.join(links)}</nav>\n" + "\n".join(bodies)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


# -------------------------------------------------------------------------------------------------------------- sections


def _rounds(run: pathlib.Path, section: Section) -> None:
    summary = read_json(run / "summary.json")
    section.table(pd.DataFrame(summary["rounds"]).drop(columns=["schema_version"], errors="ignore"))


def _learning(run: pathlib.Path, section: Section) -> None:
    rollouts = frames.metrics(run, "rollout")
    section.figure(figures.learning_curve(rollouts), "learning", "Points: one rollout step. Lines: mean of five neighbouring steps.")
    hidden = ["kind", "time", "index", "inclusion", "rho"]
    section.table(rollouts.drop(columns=hidden, errors="ignore"), "every rollout step", folded=True)
    section.table(frames.metrics(run, "update").drop(columns=hidden, errors="ignore"), "every optimizer update", folded=True)


def _validation(run: pathlib.Path, section: Section) -> None:
    for outcome in ("success", "reward"):
        rows = frames.validation(run, outcome)
        caption = f"Validation {outcome}: mean over tasks and 95% interval over resampled tasks."
        section.figure(figures.validation_curve(rows, outcome), f"validation-{outcome}", caption)
        section.table(rows)
    gained = frames.progress(run)
    if len(gained):
        caption = "Bare success at each round's end against the policy before training, on the same tasks; 95% interval over resampled tasks."
        section.figure(figures.differences(gained), "progress", caption)
        section.table(gained)


def _conditions(run: pathlib.Path, section: Section) -> None:
    results = frames.condition_results(run)
    for outcome in ("success", "reward"):
        caption = f"Test {outcome}: mean over tasks and 95% interval over resampled tasks."
        section.figure(figures.condition_results(results, outcome), f"test-{outcome}", caption)
    section.table(results)
    compared = frames.comparisons(run)
    if len(compared):
        section.figure(
            figures.differences(compared), "differences", "Success on the same tasks, later minus earlier; 95% interval over resampled tasks."
        )
        section.table(compared)


def _gate(run: pathlib.Path, section: Section) -> None:
    measured, fits = frames.gates(run), frames.gate_fits(run)
    for row in fits[fits["status"] != "complete"].to_dict("records"):
        section.note(f"The gate of round {row['round']} is incomplete ({row['problems']} problems) and decided nothing.")
    if len(measured):
        caption = "Contribution of each chunk to masked minus bare reward on the same task; bars are coefficient ± 1.96 HC3 standard errors."
        section.figure(figures.gate_coefficients(measured), "gate", caption)
        section.table(measured.drop(columns=["outcome"]), "every coefficient; low and high are the task bootstrap", folded=True)
    section.table(fits)


def _bank(run: pathlib.Path, section: Section) -> None:
    history = frames.banks(run)
    if history.empty:
        section.note("Every bank of this run is empty.")
        return
    section.figure(figures.bank_history(history), "bank", "A cell: the chunk was active in that round; its number is the inclusion probability rho.")
    last = history[history["round"] == history["round"].max()]
    section.table(last[["position", "id", "rho", "contribution", "text"]], "the last bank's texts", folded=True)
    section.table(history[["round", "position", "id", "title", "rho", "contribution", "q"]], "every round's bank", folded=True)


def _masks(run: pathlib.Path, section: Section) -> None:
    rates = frames.inclusion(run)
    outside = int(((rates["observed"] < rates["low"]) | (rates["observed"] > rates["high"])).sum())
    caption = f"Bars: where 95% of such rounds fall when masks are drawn as promised; {outside} of {len(rates)} points lie outside."
    section.figure(figures.mask_rates(rates), "masks", caption)
    section.table(rates, "every rate", folded=True)


def _provenance(run: pathlib.Path, section: Section) -> None:
    for name in ("versions.json", "config.json"):
        read_json(run / name)  # an absent or broken file is noted rather than shown
        text = html.escape((run / name).read_text(encoding="utf-8"))
        section.parts.append(f"<details><summary>{name}</summary><pre>{text}</pre></details>")


SECTIONS: tuple[tuple[str, str, Callable[[pathlib.Path, Section], None]], ...] = (
    ("Rounds", "What each round reached and how long it took.", _rounds),
    ("Learning curve", "Training episodes, under the round's own skill masks: not a measure of the bare policy.", _learning),
    ("Validation", "The same held-out tasks at each round's frozen checkpoint, without skills and under random masks.", _validation),
    ("Test conditions", "Tasks that neither training nor the gate saw.", _conditions),
    ("Gate", "Which skills earned their place, and which did not.", _gate),
    ("Bank", "Which skills were active when.", _bank),
    ("Masks", "Whether skills were shown as often as the curriculum promised.", _masks),
    ("Provenance", "What the run was made with.", _provenance),
)


# ------------------------------------------------------------------------------------------------------------- rendering


def svg(chart: alt.TopLevelMixin, name: str) -> str:
    """The chart as an SVG element for an HTML page; ids carry `name`, since all charts of a page share one space of ids."""
    file = io.StringIO()
    chart.save(file, format="svg")
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", file.getvalue())  # HTML knows SVG without being told
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)} chart; its numbers are in the table" ', 1)


def table(rows: pd.DataFrame) -> str:
    """A table of escaped cells; numbers are right-aligned and kept to what a reader can use."""
    numeric = [pd.api.types.is_numeric_dtype(rows[c]) and not pd.api.types.is_bool_dtype(rows[c]) for c in rows]

    def line(tag: str, values: list[str]) -> str:
        cells = zip(values, numeric, strict=True)
        return "<tr>" + "".join(f'<{tag} class="number">{v}</{tag}>' if n else f"<{tag}>{v}</{tag}>" for v, n in cells) + "</tr>"

    head = line("th", [html.escape(str(c).replace("_", " ")) for c in rows])
    body = "\n".join(line("td", [html.escape(cell(v)) for v in row]) for row in rows.itertuples(index=False, name=None))
    return f"<table><thead>{head}</thead><tbody>\n{body}\n</tbody></table>"


def cell(value: object) -> str:
    """One value as text."""
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items()) or "–"
    if isinstance(value, list):
        return ", ".join(map(cell, value)) or "–"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 and abs(value) > 1 else f"{value:.4g}"
    return str(value)
