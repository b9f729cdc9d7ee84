"""What a run says while it works: metrics.jsonl, TensorBoard and W&B for machines, bars or plain lines and a closing table for people.

metrics.jsonl is the record, TensorBoard and W&B are views of it. A checkpoint keeps `Metrics.state()`; restoring it drops what was written after that
checkpoint, since the resumed run will write those lines again.
"""

import collections
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import rich.console
import rich.markup
import rich.progress
import rich.table
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from intraskill.run_directory import plain
from intraskill.types import InputError
from intraskill.wandb_run import WandbRun

_EVENTS: Any = event_pb2  # protobuf makes its classes when it is imported, which no type checker sees


class Metrics:
    """Appends records to `DIR/metrics.jsonl` and shows their numbers in TensorBoard under `DIR/tensorboard/KIND`, and in W&B where it is given.

    Their x axis is the record's position among those of its kind (the n-th rollout, the n-th update): several updates share one rollout step. Any
    thread may write.
    """

    def __init__(self, directory: str | os.PathLike[str], wandb: WandbRun | None = None):
        """Opens the file, dropping a last line that a kill cut short. `wandb` is closed with it."""
        self._directory = pathlib.Path(directory)
        self._path = self._directory / "metrics.jsonl"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        self._boards: dict[str, _Board] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._num_lines = 0
        self._wandb = wandb
        self._lock = threading.Lock()
        self._cut(None)

    def write(self, *records: Mapping[str, Any]) -> None:
        """Appends one line per record, all durable on return. A record has at least `kind`, `round` and `step`; `time` is added when absent."""
        lines = []
        for record in records:
            missing = [k for k in ("kind", "round", "step") if k not in record]
            if missing:
                raise ValueError(f"a metrics record needs kind, round and step; {missing} missing in {dict(record)}")
            lines.append(plain({"time": round(time.time(), 3), **record}))
        with self._lock:
            self._file.write("".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._num_lines += len(lines)
            for line in lines:
                self._show(line)

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"num_lines": self._num_lines}

    def restore(self, state: Mapping[str, int]) -> None:
        """Drops the lines written after `state`."""
        self._cut(state["num_lines"])

    def close(self) -> None:
        self._file.close()
        for board in self._boards.values():
            board.close()
        if self._wandb:
            self._wandb.close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self, num_lines: int | None) -> None:
        """Keeps the first `num_lines` whole lines (None: all of them) and counts their kinds."""
        self._file.seek(0)
        kept, num_bytes = [], 0
        for line in self._file:
            if not line.endswith(b"\n") or len(kept) == num_lines:
                break
            kept.append(line)
            num_bytes += len(line)
        if num_lines is not None and len(kept) < num_lines:
            raise InputError(
                f"{self._path} has {len(kept)} whole lines but the checkpoint was taken after {num_lines}; "
                "restore the file from a copy, or remove that checkpoint to go on from the one before"
            )
        self._file.truncate(num_bytes)
        self._file.seek(0, os.SEEK_END)
        self._num_lines = len(kept)
        self._counts = collections.Counter(self._kind(number, line) for number, line in enumerate(kept, 1))
        for board in self._boards.values():
            board.close()
        self._boards = {}

    def _kind(self, number: int, line: bytes) -> str:
        try:
            kind = json.loads(line)["kind"]
            if isinstance(kind, str):
                return kind
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise InputError(
            f"{self._path}: line {number} is no record of a step; restore the file from a copy, or delete it from that line on, which does no harm "
            "where the newest checkpoint is older"
        )

    def _show(self, record: Mapping[str, Any]) -> None:
        kind, x = record["kind"], self._counts[record["kind"]]
        if kind not in self._boards:
            self._boards[kind] = _Board(self._directory / "tensorboard" / kind, x)
        shown = dict(numbers(record))
        self._boards[kind].show(x, {f"{kind}/{name}": value for name, value in shown.items()}, record["time"])
        if self._wandb:
            self._wandb.show(kind, x, shown)
        self._counts[kind] += 1


class _Board:
    """A TensorBoard event file, written by whoever calls `show`.

    Not tensorboardX's SummaryWriter: that writes in a thread which a full disk ends, and then waits for room in the thread's queue for ever.
    """

    def __init__(self, directory: pathlib.Path, first: int):
        """Begins a file whose first record is number `first`; what an interrupted process showed from there on is hidden."""
        directory.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        if first:
            self._events.write_event(
                _EVENTS.Event(step=first, session_log=_EVENTS.SessionLog(status=_EVENTS.SessionLog.START), wall_time=time.time())
            )

    def show(self, step: int, values: Mapping[str, float], walltime: float) -> None:
        for name, value in values.items():
            self._events.write_event(_EVENTS.Event(step=step, wall_time=walltime, summary=summary.scalar(name, value)))
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def numbers(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    """The numbers of a metrics record under the names that TensorBoard and W&B show, nested ones joined by "/"."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not (not prefix and name in ("time", "step")):
            yield f"{prefix}{name}", float(value)


class Progress:
    """Bars on a terminal; in a file or a pipe, one plain line every `interval` seconds for the work in hand, and one when it ends.

    with Progress() as progress:
        progress.start("round 0 rollouts", total=40)
        progress.advance("round 0 rollouts", reward="0.31")
        progress.finish("round 0 rollouts")
    """

    def __init__(self, *, console: rich.console.Console | None = None, interval: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._console = console or stdout()
        self._interval = interval
        self._clock = clock
        self._work: dict[str, _Work] = {}
        self._bars: rich.progress.Progress | None = None
        if self._console.is_terminal:
            columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.MofNCompleteColumn(), rich.progress.TimeElapsedColumn())
            more = (rich.progress.TimeRemainingColumn(), "{task.fields[figures]}")
            self._bars = rich.progress.Progress(*columns, *more, console=self._console)

    def start(self, name: str, total: int) -> None:
        """Announces work of `total` units; the name is its handle until `finish`."""
        if name in self._work:
            raise ValueError(f"progress {name!r} is already under way; finish it first, or give this work another name")
        now = self._clock()
        task = self._bars.add_task(name, total=total, figures="") if self._bars else rich.progress.TaskID(-1)
        self._work[name] = _Work(total=total, started=now, spoke=now, task=task)

    def advance(self, name: str, num: int = 1, **figures: object) -> None:
        """Counts `num` units done; `figures` are shown beside the bar until replaced."""
        work = self._work[name]
        work.done += num
        work.figures.update(figures)
        if self._bars:
            self._bars.update(work.task, advance=num, figures=work.figures_text())
        elif self._clock() - work.spoke >= self._interval:
            work.spoke = self._clock()
            self.say(work.line(name, self._clock() - work.started))

    def finish(self, name: str) -> None:
        """Ends the work, however much of it was done, and leaves one line about it."""
        work = self._work.pop(name)
        if self._bars:
            self._bars.remove_task(work.task)
        self.say(work.line(name, self._clock() - work.started, finished=True))

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bars where there are any."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> "Progress":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()


class _Work:
    """One piece of work under way."""

    def __init__(self, *, total: int, started: float, spoke: float, task: rich.progress.TaskID):
        self.total, self.started, self.spoke, self.task = total, started, spoke, task
        self.done = 0
        self.figures: dict[str, object] = {}

    def figures_text(self) -> str:
        return ", ".join(f"{k} {v}" for k, v in self.figures.items())

    def line(self, name: str, seconds: float, *, finished: bool = False) -> str:
        parts = [f"{name}: {self.done}/{self.total}", f"{duration(seconds)} elapsed"]
        if not finished and 0 < self.done < self.total:  # a step that needs a further wave has more units than were announced
            parts.append(f"about {duration(seconds / self.done * (self.total - self.done))} left")
        if self.figures:
            parts.append(self.figures_text())
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def stdout() -> rich.console.Console:
    """A console on standard output that does not fold tables to 80 columns when that is a file."""
    console = rich.console.Console()
    return console if console.is_terminal else rich.console.Console(width=150)


def print_summary(summary: Mapping[str, Any], console: rich.console.Console | None = None) -> None:
    """Prints the closing tables from the content of summary.json: rounds, test conditions, paired comparisons."""
    console = console or stdout()
    rounds = rich.table.Table(
        "round", "bare success", "masked success", "bank", "admitted", "time", title="Validation at each round's frozen checkpoint"
    )
    for r in summary["rounds"]:
        success = (_percent(r["bare_success"]), _percent(r["masked_success"]))
        rounds.add_row(str(r["round"]), *success, str(r["bank_size"]), rich.markup.escape(", ".join(r["admitted"])), duration(r["seconds"]))
    tests = rich.table.Table("condition", "success", "reward", "episodes", title="Test conditions")
    for condition, t in summary["test"].items():
        reward = "" if t["reward"] is None else f"{t['reward']:.4f}"
        tests.add_row(condition, _percent(t["success"]), reward, str(t["num_episodes"]))
    comparisons = rich.table.Table("comparison", "difference (points)", "95% interval", title="Paired differences in success")
    for c in summary["comparisons"]:
        low, high = c["interval"]
        comparisons.add_row(rich.markup.escape(c["name"]), f"{100 * c['difference']:+.2f}", f"[{100 * low:+.2f}, {100 * high:+.2f}]")
    for table in (rounds, tests, comparisons):
        if table.row_count:
            console.print(table)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}%"
