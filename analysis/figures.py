"""Altair charts of the tables in `frames`: each function takes a table and returns a chart, and no chart computes a statistic.

Colours are of the Okabe-Ito set, which colour-blind readers can tell apart; where colour carries meaning, shape or a label carries it too.
"""

import altair as alt
import pandas as pd

WIDTH = 640
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#767676"

# What the gate made of a chunk -> what a reader needs to see at a glance.
OUTCOMES = {
    "selected": "selected",
    "rewrite_loser": "lost to another version",
    "retired": "retired",
    "non_positive": "not positive",
    "over_capacity": "over capacity",
    "undecided": "undecided",
}
_OUTCOME_COLORS = [GREEN, PURPLE, RED, ORANGE, BLUE, GREY]


def learning_curve(rollouts: pd.DataFrame) -> alt.LayerChart:
    """Training reward and success per rollout step, with the start of each round marked."""
    curves = rollouts.melt(["index"], ["reward", "success"], "outcome", "value").dropna()
    color = alt.Color("outcome:N", title=None, scale=alt.Scale(domain=["reward", "success"], range=[BLUE, ORANGE]), legend=alt.Legend(orient="top"))
    x = alt.X("index:Q", title="rollout step", axis=alt.Axis(format="d", tickMinStep=1))
    y = alt.Y("value:Q", title="mean over the step's scored episodes", scale=alt.Scale(domain=[0, 1]))
    raw = alt.Chart(curves).mark_point(opacity=0.45, size=18, filled=True).encode(x=x, y=y, color=color)
    smooth = alt.Chart(curves).transform_window(frame=[-2, 2], groupby=["outcome"], smooth="mean(value)", sort=[{"field": "index"}])
    lines = smooth.mark_line(strokeWidth=2).encode(x="index:Q", y="smooth:Q", color=color, strokeDash=alt.StrokeDash("outcome:N", legend=None))
    return alt.layer(_round_starts(rollouts), raw, lines).properties(width=WIDTH, height=260)


def _round_starts(rollouts: pd.DataFrame) -> alt.LayerChart:
    starts = rollouts.groupby("round", as_index=False)["index"].min()
    starts["label"] = "round " + starts["round"].astype(str)
    rules = alt.Chart(starts).mark_rule(color=GREY, strokeDash=[2, 3]).encode(x="index:Q")
    labels = alt.Chart(starts).mark_text(align="left", dx=4, dy=8, color=GREY, fontSize=10).encode(x="index:Q", y=alt.value(0), text="label:N")
    return alt.layer(rules, labels)


def validation_curve(validation: pd.DataFrame, outcome: str) -> alt.LayerChart:
    """Bare and masked validation before training and per round, with 95% task-bootstrap intervals."""
    top = alt.Legend(orient="top")
    color = alt.Color("arm:N", title=None, scale=alt.Scale(domain=["bare", "masked"], range=[BLUE, ORANGE]), legend=top)
    shape = alt.Shape("arm:N", title=None, scale=alt.Scale(domain=["bare", "masked"], range=["circle", "square"]), legend=top)
    x = alt.X("at:N", title=None, sort=list(dict.fromkeys(validation["at"])), axis=alt.Axis(labelAngle=0))
    base = alt.Chart(validation).encode(x=x, xOffset=alt.XOffset("arm:N"), color=color)
    percent = alt.Axis(format="%") if outcome == "success" else alt.Axis()
    bars = base.mark_rule(strokeWidth=2).encode(
        y=alt.Y("low:Q", title=f"validation {outcome}", scale=alt.Scale(zero=False), axis=percent), y2="high:Q"
    )
    points = base.mark_point(filled=True, size=70, opacity=1).encode(y="mean:Q", shape=shape)
    return alt.layer(bars, points).properties(width=WIDTH, height=220)


def condition_results(results: pd.DataFrame, outcome: str) -> alt.LayerChart:
    """One outcome of every test condition, with 95% task-bootstrap intervals."""
    rows = results[results["outcome"] == outcome].assign(label=lambda t: t["mean"].map("{:.1%}".format if outcome == "success" else "{:.3f}".format))
    y = alt.Y("condition:N", title=None, sort=list(rows["condition"]), axis=alt.Axis(labelLimit=260))
    axis = alt.Axis(format="%") if outcome == "success" else alt.Axis()
    x = alt.X("low:Q", title=f"test {outcome}", scale=alt.Scale(domain=[0, 1]), axis=axis)
    bars = alt.Chart(rows).mark_rule(strokeWidth=2, color=BLUE).encode(x=x, x2="high:Q", y=y)
    points = alt.Chart(rows).mark_point(filled=True, size=80, color=BLUE, opacity=1).encode(x="mean:Q", y=y)
    labels = alt.Chart(rows).mark_text(dy=-11, fontSize=11).encode(x="mean:Q", y=y, text="label:N")
    return alt.layer(bars, points, labels).properties(width=WIDTH, height=alt.Step(42))


def differences(comparisons: pd.DataFrame) -> alt.LayerChart:
    """Paired differences in success, in points."""
    rows = comparisons.assign(**{name: 100 * comparisons[name] for name in ("difference", "low", "high")})
    y = alt.Y("comparison:N", title=None, sort=list(rows["comparison"]), axis=alt.Axis(labelLimit=320))
    bars = (
        alt.Chart(rows).mark_rule(strokeWidth=2, color=BLUE).encode(x=alt.X("low:Q", title="paired difference in success, points"), x2="high:Q", y=y)
    )
    points = alt.Chart(rows).mark_point(filled=True, size=80, color=BLUE, opacity=1).encode(x="difference:Q", y=y)
    return alt.layer(_zero("x"), bars, points).properties(width=WIDTH, height=alt.Step(30))


def gate_coefficients(gates: pd.DataFrame) -> alt.VConcatChart:
    """Every measured chunk's contribution with its 95% HC3 interval, one panel a round, coloured by what the gate made of it."""
    rows = gates.assign(outcome_name=gates["status"].map(OUTCOMES), role=gates["current"].map({True: "active", False: "candidate"}))
    scale = alt.Scale(domain=list(OUTCOMES.values()), range=_OUTCOME_COLORS)
    limits = rows[["hc3_low", "hc3_high", "coefficient"]]
    low, high = min(0.0, float(limits.min().min())), max(0.0, float(limits.max().max()))  # one scale for all rounds, with zero on it
    panels = []
    for round_index, panel in rows.groupby("round"):
        order = list(panel.sort_values("coefficient", ascending=False)["id"])
        y = alt.Y("id:N", title=None, sort=order, axis=alt.Axis(labelLimit=260))
        x = alt.X("hc3_low:Q", title="contribution to reward, with 95% HC3 interval", scale=alt.Scale(domain=[low, high]))
        color = alt.Color("outcome_name:N", title="verdict", scale=scale)
        bars = alt.Chart(panel).mark_rule(strokeWidth=2).encode(x=x, x2="hc3_high:Q", y=y, color=color)
        points = (
            alt.Chart(panel)
            .mark_point(filled=True, size=80, opacity=1)
            .encode(
                x="coefficient:Q", y=y, color=color, shape=alt.Shape("role:N", title="measured as", scale=alt.Scale(domain=["active", "candidate"]))
            )
        )
        panels.append(alt.layer(_zero("x"), bars, points).properties(width=WIDTH - 120, height=alt.Step(22), title=f"round {round_index}"))
    return alt.vconcat(*panels)


def bank_history(banks: pd.DataFrame) -> alt.LayerChart:
    """Which chunk was active in which round, shaded and labelled by its inclusion probability."""
    rows = banks.assign(label=banks["rho"].map(lambda r: "active" if pd.isna(r) else f"{r:.2f}"))
    order = list(dict.fromkeys(rows.sort_values(["round", "position"])["id"]))
    x = alt.X("round:O", title="round", scale=alt.Scale(domain=sorted(rows["round"].unique().tolist())), axis=alt.Axis(orient="top", labelAngle=0))
    base = alt.Chart(rows).encode(x=x, y=alt.Y("id:N", title=None, sort=order, axis=alt.Axis(labelLimit=260)))
    shade = alt.Color("rho:Q", title="rho", scale=alt.Scale(domain=[0, 1], scheme="blues"))
    dark = alt.condition("datum.rho > 0.6", alt.value("white"), alt.value("black"))
    cells = base.mark_rect(stroke="white", invalid="show").encode(color=alt.condition("isValid(datum.rho)", shade, alt.value("#e4e4e4")))
    return alt.layer(cells, base.mark_text(fontSize=11).encode(text="label:N", color=dark)).properties(width=alt.Step(72), height=alt.Step(22))


def mask_rates(inclusion: pd.DataFrame) -> alt.LayerChart:
    """How often each chunk was drawn against how often it should be: points on the diagonal, within the bands."""
    color = alt.Color("round:N", title="round", scale=alt.Scale(scheme="tableau10"))
    scale = alt.Scale(domain=[0, 1])
    x = alt.X("expected:Q", title="promised share of groups: rho, or q for skill-free", scale=scale)
    line = alt.Chart(pd.DataFrame({"at": [0.0, 1.0]})).mark_line(color=GREY, strokeDash=[4, 4]).encode(x="at:Q", y="at:Q")
    bands = (
        alt.Chart(inclusion)
        .mark_rule(strokeWidth=2, opacity=0.5)
        .encode(x=x, y=alt.Y("low:Q", title="observed", scale=scale), y2="high:Q", color=color)
    )
    points = alt.Chart(inclusion).mark_point(filled=True, size=60, opacity=0.9).encode(x=x, y="observed:Q", color=color)
    return alt.layer(line, bands, points).properties(width=360, height=300)


def _zero(axis: str) -> alt.Chart:
    return alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(color=GREY, strokeDash=[2, 3]).encode(**{axis: "zero:Q"})
