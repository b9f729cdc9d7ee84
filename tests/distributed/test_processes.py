"""Several processes on one machine: the same training as one process, and one error everywhere when a process ends."""

import os
import signal
import socket

import numpy as np
import pytest
from distributed import job

WORKER = "tests/distributed/worker.py"
# Seconds on quiet cores. What is bounded is bounded by the heartbeat; the rest is a busy machine.
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def trained(launcher, tmp_path_factory):
    """Parameters after three updates, by the number of processes."""
    found = {}
    for num_processes in (1, 2, 4):
        scratch = tmp_path_factory.mktemp(f"of{num_processes}")
        processes = job.start(launcher, WORKER, num_processes, "train", str(scratch))
        assert [p.wait() for p in processes.processes] == [0] * num_processes, processes.errors()
        assert f"position {{'round_starts': [0], 'step': 2}} processes {num_processes}" in processes.processes[0].stdout.replace(
            "{'step': 2, 'round_starts': [0]}", "{'round_starts': [0], 'step': 2}"
        )
        arrays = {name: dict(np.load(scratch / f"{name}.npz")) for name in ("after", "again")}
        found[num_processes] = arrays, scratch
    return found


@pytest.mark.parametrize("num_processes", [2, 4])
def test_several_processes_train_as_one_does(trained, num_processes):
    (one, _), (several, _) = trained[1], trained[num_processes]
    assert several["after"].keys() == one["after"].keys() and len(one["after"]) > 10
    for name, expected in one["after"].items():
        np.testing.assert_allclose(several["after"][name], expected, rtol=0, atol=1e-5, err_msg=name)


def test_training_moves_the_parameters_by_more_than_the_tolerance(trained):
    from distributed import worker

    start, (one, _) = worker.flat(worker.make_params()), trained[1]
    moved = {name: np.abs(one["after"][name] - start[name]).max() for name in start}
    assert min(moved.values()) > 1e-4


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_what_was_saved_together_is_restored_together(trained, num_processes):
    arrays, _ = trained[num_processes]
    for name, expected in arrays["after"].items():
        np.testing.assert_array_equal(arrays["again"][name], expected, err_msg=name)


def test_without_a_cluster_to_ask_a_process_is_alone(launcher, tmp_path):
    process = launcher.run(WORKER, "alone", str(tmp_path))
    assert process.status == 0 and process.stdout == "processes 1, devices 1\n", process.stderr


def ended(launcher, tmp_path, task: str, num_processes: int = 3) -> job.Job:
    return job.start(launcher, WORKER, num_processes, task, str(tmp_path))


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_to_which_the_others_do_not_come_says_so_and_ends(launcher, tmp_path, number):
    address = job.coordinator()
    process = launcher.run(WORKER, "lonely", str(tmp_path), *job.place(address, 2, number))
    assert process.status == 2, process.stderr  # JAX itself would abort with a stack trace
    expected = f"error: not all processes of the job have come to {address} within 5 s: see that each was started"
    assert process.stderr.startswith(expected) and process.stderr.count("\n") == 1


def test_a_process_0_whose_port_is_taken_names_it(launcher, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = launcher.run(WORKER, "lonely", str(tmp_path), *job.place(address, 2, 0))
    assert process.status == 2 and "Traceback" not in process.stderr
    assert process.stderr.startswith(f"error: this process could not join the job at {address}: "), process.stderr
    assert "Address already in use" in process.stderr and process.stderr.count("\n") == 1  # JAX, asked to listen there, crashed once in CI


def test_a_process_killed_in_a_collective_ends_the_others_with_its_name(launcher, tmp_path):
    of_three = ended(launcher, tmp_path, "1:killed")
    first, killed, other = of_three.processes
    assert killed.wait() == -signal.SIGKILL
    assert (first.wait(), other.wait()) == (2, 2), of_three.errors()
    for process in (first, other):
        last = process.stderr.strip().splitlines()[-1]
        assert last.startswith("error: ") and "process 1 on " in last and "has died" in last, of_three.errors()
        assert "Traceback" not in process.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])  # JAX's preemption service would take the second and go on
def test_a_process_killed_while_the_engines_play_is_noticed_too(launcher, tmp_path, number):
    of_three = ended(launcher, tmp_path, "2:killed-waiting")
    first, other, killed = of_three.processes
    first.wait_until(lambda: "waiting" in first.stdout)
    killed.wait_until(lambda: "waiting" in killed.stdout)
    os.kill(killed.pid, number)
    assert killed.wait() == -number
    assert (first.wait(), other.wait()) == (2, 2), of_three.errors()
    for process in (first, other):
        assert "process 2 on " in process.stderr and "has died" in process.stderr and "Traceback" not in process.stderr


def test_a_process_that_hangs_is_given_up_after_the_heartbeat(launcher, tmp_path):
    of_two = ended(launcher, tmp_path, "1:stopped", 2)
    first, stopped = of_two.processes
    try:
        assert first.wait() == 2, of_two.errors()
    finally:
        os.kill(stopped.pid, signal.SIGKILL)
        stopped.wait()
    assert "process 1 on " in first.stderr and "has said nothing for 15 s" in first.stderr


def test_a_process_that_fails_is_quoted(launcher, tmp_path):
    of_three = ended(launcher, tmp_path, "2:failing")
    assert [p.wait() for p in of_three.processes] == [2, 2, 2], of_three.errors()
    first, other, failed = of_three.processes
    assert failed.stderr.strip().splitlines()[-1] == "error: this process is failing: look elsewhere"
    for process in (first, other):
        assert "process 2 on " in process.stderr and "this process is failing: look elsewhere" in process.stderr


def test_the_others_end_when_process_0_is_killed(launcher, tmp_path):
    of_three = ended(launcher, tmp_path, "0:killed-waiting")
    first, *others = of_three.processes
    first.wait_until(lambda: "waiting" in first.stdout)
    os.kill(first.pid, signal.SIGKILL)
    for process in others:
        assert process.wait() not in (0, None), of_three.errors()
        # JAX's service lived in process 0, and its clients may be quicker to say so than we are.
        assert "process 0 has died" in process.stderr or "another task died" in process.stderr, of_three.errors()
