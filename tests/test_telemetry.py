import io
import json

import pytest
import rich.console
from tensorboardX.proto import event_pb2

from intraskill.telemetry import Metrics, Progress, duration, print_summary
from intraskill.types import InputError


def record(kind="rollout", step=0, **fields):
    return {"kind": kind, "round": 0, "step": step, **fields}


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def scalars(directory):
    """Reads a TensorBoard directory: 8 bytes of length, 4 of checksum, the event, 4 of checksum, and again."""
    found = []
    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += length + 16
    return found


def test_metrics_are_lines_of_json(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(record(reward=0.5, inclusion={"a@1": 0.25}), record("update", loss=float("nan")))
        assert metrics.state() == {"num_lines": 2}
        first, second = lines(tmp_path)  # durable before close
    assert first.pop("time") > 0
    assert first == record(reward=0.5, inclusion={"a@1": 0.25})
    assert second["loss"] is None


def test_metrics_need_their_keys(tmp_path):
    with Metrics(tmp_path) as metrics, pytest.raises(ValueError, match=r"\['step'\] missing"):
        metrics.write({"kind": "rollout", "round": 0})
    assert lines(tmp_path) == []


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(record(step=0), record("update", step=0))
        state = metrics.state()
        metrics.write(record(step=1, reward=0.1))
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"kind": "upd')  # cut short by a kill
    with Metrics(tmp_path) as metrics:
        assert metrics.state() == {"num_lines": 3}
        metrics.restore(state)
        metrics.write(record(step=1, reward=0.2))
    assert [(r["kind"], r["step"], r.get("reward")) for r in lines(tmp_path)] == [("rollout", 0, None), ("update", 0, None), ("rollout", 1, 0.2)]


def test_resuming_from_a_shortened_file_is_refused(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(record())
        with pytest.raises(InputError, match=r"has 1 whole lines but the checkpoint was taken after 5"):
            metrics.restore({"num_lines": 5})


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"null", b"NaN", b'{"step": 1}', b'{"kind": 3}', b'{"kind": "roll', b"\xff", b"[" * 100_000, b"\x00" * 9]
)
def test_a_line_that_is_no_record_is_refused_by_its_number(tmp_path, line):
    with Metrics(tmp_path) as metrics:
        metrics.write(record())
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(before + line + b"\n" + before)
    with pytest.raises(InputError, match=r"metrics.jsonl: line 2 is no record of a step; restore the file from a copy, or"):
        Metrics(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before + line + b"\n" + before


def test_tensorboard_counts_records_of_a_kind(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(record("update", 3, loss=1.5), record("update", 3, loss=0.5, note="text"), record("rollout", 4, inclusion={"a@1": 0.25}))
    updates = scalars(tmp_path / "tensorboard" / "update")
    assert [s for s in updates if s[0] == "update/loss"] == [("update/loss", 0, 1.5), ("update/loss", 1, 0.5)]
    assert ("rollout/inclusion/a_1", 0, 0.25) in scalars(tmp_path / "tensorboard" / "rollout")
    with Metrics(tmp_path) as metrics:
        metrics.write(record("update", 5, loss=0.25))
    assert ("update/loss", 2, 0.25) in scalars(tmp_path / "tensorboard" / "update")


def log(out):
    return rich.console.Console(file=out, width=150)


def test_progress_in_a_log_file_is_a_line_now_and_then():
    now, out = [0.0], io.StringIO()
    with Progress(console=log(out), interval=10, clock=lambda: now[0]) as progress:
        progress.start("rollouts", 40)
        for _ in range(20):
            now[0] += 3
            progress.advance("rollouts", reward="0.50")
        progress.say("saved")
        progress.finish("rollouts")
    # Units 4, 8, 12, ... are the first at or after 10 s of silence, each 3 s long.
    expected = [f"rollouts: {n}/40, {duration(3 * n)} elapsed, about {duration(3 * (40 - n))} left, reward 0.50" for n in (4, 8, 12, 16, 20)]
    assert out.getvalue().splitlines() == [*expected, "saved", "rollouts: 20/40, 1:00 elapsed, reward 0.50"]


def test_progress_on_a_terminal_draws_bars():
    out = io.StringIO()
    with Progress(console=rich.console.Console(file=out, force_terminal=True)) as progress:
        progress.start("rollouts", 2)
        progress.advance("rollouts", reward="[0.5]")
        progress.finish("rollouts")
    assert "rollouts: 1/2" in out.getvalue() and "━" in out.getvalue()


def test_progress_names_are_unique():
    with Progress(console=log(io.StringIO())) as progress:
        progress.start("a", 1)
        with pytest.raises(ValueError, match="already under way"):
            progress.start("a", 1)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (7325, "2:02:05")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_summary_tables():
    out = io.StringIO()
    rounds = [{"round": 0, "bare_success": 0.5175, "masked_success": None, "bank_size": 10, "admitted": ["return@1", "[b]@2"], "seconds": 61}]
    comparisons = [{"name": "final bare - base bare", "difference": 0.325, "interval": [0.275, 0.375]}]
    print_summary(
        {"rounds": rounds, "test": {"base_bare": {"success": 0.5175, "reward": 0.54221, "num_episodes": 400}}, "comparisons": comparisons}, log(out)
    )
    text = out.getvalue()
    for part in ("51.75%", "0.5422", "400", "1:01", "return@1, [b]@2", "final bare - base bare", "+32.50", "[+27.50, +37.50]"):
        assert part in text, part
