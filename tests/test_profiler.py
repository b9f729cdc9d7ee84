"""The profiler's window: which steps it names, when it records, and that jax really writes a trace."""

import logging

import jax
import jax.numpy as jnp
import pytest

from intraskill.profiler import Profiler, window
from intraskill.types import InputError


@pytest.mark.parametrize(("text", "steps"), [("", []), ("0", [0]), ("3:5", [3, 4, 5]), ("9:9", [9])])
def test_windows_include_both_ends(text, steps):
    assert list(window(text, 10)) == steps


@pytest.mark.parametrize("text", ["5:3", "8:10", "10", "-1:3", "a", "1:", "1-3", "1:2:3"])
def test_windows_that_name_no_steps_of_the_run_are_refused(text):
    with pytest.raises(InputError, match=f"profile = '{text}'.*< 10"):
        window(text, 10)


@pytest.fixture
def there(tmp_path):
    return tmp_path / "profile"


@pytest.fixture
def calls(monkeypatch):
    """What the profiler was told, in order."""
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory, profiler_options: found.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


def play(profiler, calls, steps):
    for step in steps:
        with profiler.step(step):
            calls.append(step)


def test_the_window_opens_with_its_first_step_and_closes_after_its_last(calls, there):
    profiler = Profiler(there, range(2, 4))
    play(profiler, calls, range(6))
    profiler.close()
    assert calls == [0, 1, "start", 2, 3, "stop", 4, 5]


def test_a_trace_that_cannot_be_written_is_a_warning_and_the_run_goes_on(calls, there, caplog, monkeypatch):
    def refuse():
        raise RuntimeError(f"FAILED_PRECONDITION: {there} is not a directory")  # as JAX has it

    monkeypatch.setattr(jax.profiler, "stop_trace", refuse)
    with caplog.at_level(logging.WARNING):
        play(Profiler(there, range(1)), calls, [0, 1])
    assert calls == ["start", 0, 1]
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "intraskill.profiler"]
    assert f"could not be written to {there}" in warning and "FAILED_PRECONDITION" in warning


def test_a_directory_that_can_hold_no_trace_is_refused_before_the_run(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    with pytest.raises(InputError, match=r"profile \(.*: remove what is in the way, or leave out --profile"):
        Profiler(tmp_path / "profile", range(1, 2))
    Profiler(tmp_path / "profile")  # nothing is to be recorded


@pytest.mark.parametrize(("step", "past"), [(0, []), (2, []), (3, [2]), (4, [2, 3]), (9, [2, 3])])
def test_what_of_the_window_a_resumed_run_has_done_already(tmp_path, step, past):
    assert list(Profiler(tmp_path, range(2, 4)).past(step)) == past
    assert not Profiler(tmp_path).past(step)


def test_a_run_resumed_inside_the_window_records_the_rest_and_one_that_ends_inside_writes_it(calls, there):
    play(Profiler(there, range(2, 4)), calls, [3, 4])
    assert calls == ["start", 3, "stop", 4]
    calls.clear()
    profiler = Profiler(there, range(2, 4))
    play(profiler, calls, [1, 2])
    profiler.close()
    assert calls == [1, "start", 2, "stop"]


def test_an_error_ends_the_window_and_is_raised(calls, there):
    profiler = Profiler(there, range(2, 9))
    with pytest.raises(RuntimeError, match="broken"), profiler.step(2):
        raise RuntimeError("broken")
    profiler.close()
    assert calls == ["start", "stop"]


def test_without_a_window_nothing_happens(calls):
    profiler = Profiler("there")
    play(profiler, calls, range(3))
    profiler.close()
    assert calls == [0, 1, 2]


def test_a_trace_is_written(tmp_path):
    profiler = Profiler(tmp_path / "profile", range(1, 3))
    for step in range(4):
        with profiler.step(step):
            jax.block_until_ready(jnp.arange(8.0) * 2.0)
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    assert b"step_num" in content and len(content) > 1000
