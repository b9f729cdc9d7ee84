import errno
import io
import json
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import rich.console
from tensorboardX.proto import event_pb2

from analysis.wandb_export import compare
from intraskill import wandb_run
from intraskill.run_directory import read_json
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


def test_a_disk_that_fills_up_ends_the_run_with_its_own_error(tmp_path):
    """More records than any queue holds, and a limit on a file's size that only TensorBoard's view can meet."""
    code = f"""
import resource, sys, types
from intraskill.telemetry import Metrics
metrics = Metrics({str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
metrics._file = types.SimpleNamespace(write=len, flush=lambda: None, fileno=metrics._file.fileno)
try:
    for step in range(400):
        metrics.write({{"kind": "update", "round": 0, "step": step, **{{f"x{{i}}": i for i in range(30)}}}})
except OSError as error:
    print("refused", error.errno)
    sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"refused {errno.EFBIG}\n", "")


def test_threads_write_whole_lines(tmp_path):
    with Metrics(tmp_path) as metrics:

        def write(thread):
            for i in range(25):
                metrics.write(record("rollout" if thread % 2 else "update", step=i, thread=thread))

        threads = [threading.Thread(target=write, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert metrics.state() == {"num_lines": 100}
    found = [(line["thread"], line["step"]) for line in lines(tmp_path)]
    assert sorted(found) == [(t, i) for t in range(4) for i in range(25)]
    shown = scalars(tmp_path / "tensorboard" / "update")
    assert [x for tag, x, _ in shown if tag == "update/thread"] == list(range(50))


# ------------------------------------------------------------------------------------------------------------------- W&B


class FakeWandb(types.ModuleType):
    """W&B's documented interface, as far as it is used: `init` returns a run with `define_metric`, `log` and `finish`."""

    def __init__(self):
        super().__init__("wandb")
        self.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.starts, self.axes, self.rows, self.finished, self.refuses, self.breaks = [], [], [], 0, "", False

    def Settings(self, **settings):
        return settings

    def init(self, **arguments):
        if self.refuses:
            raise self.errors.Error(self.refuses)
        self.starts.append(arguments)
        return self

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, row):
        if self.breaks:
            raise BrokenPipeError("service gone")
        self.rows.append({"_step": len(self.rows), **row})

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


RECORDS = (
    record("update", 3, loss=1.5, note="text", grad_norm=float("nan")),
    record("update", 3, loss=0.1),
    record("rollout", 4, inclusion={"a@1": 1 / 3}),
)


def test_wandb_gets_a_row_for_each_record(wandb, tmp_path):
    with Metrics(tmp_path / "run", wandb_run.WandbRun(tmp_path / "run", {"seed": 0})) as metrics:
        metrics.write(*RECORDS)
        assert wandb.finished == 0
    assert wandb.finished == 1
    (start,) = wandb.starts
    assert (start["project"], start["name"], start["resume"], start["config"], start["dir"]) == (
        "intraskill",
        "run",
        "allow",
        {"seed": 0},
        tmp_path / "run",
    )
    assert wandb.axes == [("update/index", None), ("update/*", "update/index"), ("rollout/index", None), ("rollout/*", "rollout/index")]
    assert wandb.rows == [
        {"_step": 0, "update/index": 0, "update/round": 0.0, "update/loss": 1.5},
        {"_step": 1, "update/index": 1, "update/round": 0.0, "update/loss": 0.1},
        {"_step": 2, "rollout/index": 0, "rollout/round": 0.0, "rollout/inclusion/a@1": 1 / 3},
    ]


def test_a_resumed_run_continues_its_wandb_run_and_its_export_agrees_with_the_log(wandb, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with Metrics(run, wandb_run.WandbRun(run, {})) as metrics:
        metrics.write(RECORDS[0])
        state = metrics.state()
        metrics.write(record("update", 3, loss=9.0))  # of a step that was not finished
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with Metrics(run, wandb_run.WandbRun(run, {})) as metrics:
        metrics.restore(state)
        metrics.write(*RECORDS[1:])
    first, second = wandb.starts
    assert first["id"] == second["id"] == read_json(run / "wandb.json")["id"] and (first["project"], second["project"]) == ("intraskill", "mine")
    (tmp_path / "export.json").write_text(json.dumps(wandb.rows))
    assert len(wandb.rows) == 4 and compare(run, tmp_path / "export.json") == []


def test_a_view_that_breaks_is_left_out_with_one_warning_and_the_run_goes_on(wandb, tmp_path, caplog):
    with Metrics(tmp_path, wandb_run.WandbRun(tmp_path, {})) as metrics:
        metrics.write(RECORDS[0])
        wandb.breaks = True
        metrics.write(*RECORDS[1:])
    assert len(wandb.rows) == 1 and wandb.finished == 0 and len(lines(tmp_path)) == 3
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "intraskill.wandb_run"]
    assert "takes no more records (BrokenPipeError: service gone)" in warning


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"id": 3}', '"id"'])
def test_a_damaged_name_of_the_wandb_run_is_one_error(wandb, tmp_path, content):
    (tmp_path / "wandb.json").write_text(content)
    with pytest.raises(InputError, match="wandb.json"):
        wandb_run.WandbRun(tmp_path, {})
    assert wandb.starts == []


def test_wandb_that_is_not_there_or_does_not_start_is_said_to_be_so(wandb, tmp_path, monkeypatch):
    wandb.refuses = "api_key not configured"
    with pytest.raises(InputError, match="W&B does not start: api_key not configured; log in"):
        wandb_run.WandbRun(tmp_path, {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"cannot be imported.*pip install '\.\[wandb\]'"):
        wandb_run.load()
    (tmp_path / "wandb").mkdir()  # what W&B itself leaves in a directory
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InputError, match="is a directory, not the package"):
        wandb_run.load()


def wandb_records(data, record_type):
    """The protobufs of a file of W&B's: a header of 7 bytes, then blocks of 32 KiB with pieces of records, each after checksum, length and kind."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record_type.FromString(whole)
            whole = b""


@pytest.mark.wandb
def test_wandb_itself_writes_every_number_offline(tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    for record_of_start in RECORDS[:1], RECORDS[1:]:  # started, then resumed
        with Metrics(run, wandb_run.WandbRun(run, {"seed": 0})) as metrics:
            metrics.write(*record_of_start)
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    identity = read_json(run / "wandb.json")["id"]
    assert {path.name for path in files} == {f"run-{identity}.wandb"}
    rows = []
    for path in files:
        for found in wandb_records(path.read_bytes(), wandb_internal_pb2.Record):
            if found.WhichOneof("record_type") == "history":
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in found.history.item})
    (tmp_path / "export.json").write_text(json.dumps(rows))
    assert len(rows) == 3 and compare(run, tmp_path / "export.json") == []


# -------------------------------------------------------------------------------------------------------------- progress


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


def test_progress_beyond_what_was_announced_promises_nothing():
    """A step whose groups fail plays further ones."""
    now, out = [0.0], io.StringIO()
    with Progress(console=log(out), interval=1, clock=lambda: now[0]) as progress:
        progress.start("rollouts", 2)
        for _ in range(3):
            now[0] += 60
            progress.advance("rollouts")
        progress.finish("rollouts")
    assert out.getvalue().splitlines() == [
        "rollouts: 1/2, 1:00 elapsed, about 1:00 left",
        "rollouts: 2/2, 2:00 elapsed",
        "rollouts: 3/2, 3:00 elapsed",
        "rollouts: 3/2, 3:00 elapsed",
    ]


def test_progress_of_two_threads_stays_readable_in_a_log_file():
    out = io.StringIO()
    with Progress(console=log(out), interval=0) as progress:

        def work(name):
            progress.start(name, 50)
            for i in range(50):
                progress.advance(name, seen=i)
            progress.finish(name)

        threads = [threading.Thread(target=work, args=(name,)) for name in ("step 1: update", "step 2: rollout")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = out.getvalue().splitlines()
    for name in ("step 1: update", "step 2: rollout"):
        own = [line for line in found if line.startswith(f"{name}: ")]
        assert [line.split(",")[0] for line in own] == [f"{name}: {i}/50" for i in (*range(1, 51), 50)]
        assert [line.rpartition(" ")[2] for line in own] == [str(i) for i in (*range(50), 49)]
    assert len(found) == 102


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
