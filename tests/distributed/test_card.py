"""The pod's own command on this machine: two training processes, two engine servers, two rounds, the rule-based analyst, the pocket checkpoint."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from distributed import card, job
from rollout import engine_process

from configs import coevolve
from intraskill.rollout import records
from intraskill.run_directory import read_json

pytestmark = pytest.mark.timeout(1500)


def test_the_overrides_are_sizes_paths_and_addresses_of_the_pods_config():
    given = [flag.removeprefix("--config.").partition("=")[0] for flag in card.flags(Path("runs"), ["http://127.0.0.1:1"])[1:]]
    assert set(given) == card.PERMITTED and len(given) == len(card.PERMITTED)
    config = coevolve.get_config()
    for key in card.SIZES:
        section, _, name = key.partition(".")
        assert type(config[section][name]) is int, f"{key} is no size"
    decides = ("engine.", "curriculum.", "distributed.", "checkpoint.", "bank.", "seed", "model.")
    assert not [key for key in card.SIZES if key.startswith(decides)]


@pytest.fixture(scope="module")
def finished(launcher, tmp_path_factory):
    """The run's directory, its processes, what the servers called their weights at its end, and where the servers are."""
    runs = tmp_path_factory.mktemp("runs")
    # One after the other: the second finds what the first has compiled.
    engines = [engine_process.start(launcher, Path("pocket/checkpoint"), max_length=card.SIZES["rollout.max_context"], slots=8) for _ in range(2)]
    trainers = job.start(launcher, "launch/train.py", 2, *card.flags(runs, [address for _, address in engines]), connections=True)
    for process in trainers.processes:
        process.wait(1200)

    async def served() -> list[str]:
        async with aiohttp.ClientSession() as http:
            answers = [await (await http.get(address + "/model_info")).json() for _, address in engines]
        return [answer["weight_version"] for answer in answers]

    versions = asyncio.run(served())
    for process, _ in engines:
        os.kill(process.pid, signal.SIGTERM)
        process.wait()
    return runs / "coevolve", trainers, versions, {("127.0.0.1", int(address.rpartition(":")[2])) for _, address in engines}


def test_both_processes_end_well_and_only_the_first_has_something_to_say(finished):
    run, trainers, *_ = finished
    assert [p.status for p in trainers.processes] == [0, 0], trainers.errors()
    first, other = trainers.processes
    assert " ".join(first.stdout.split()).endswith(f"report: {run / 'report' / 'index.html'}")
    assert not [line for line in other.stdout.splitlines() if not line.startswith("[Gloo]")], other.stdout


def test_only_process_0_talks_to_the_shop_and_the_engines(finished):
    _, trainers, _, engines = finished
    first, other = (set(p.connections) for p in trainers.processes)
    (shop,) = first - engines
    assert engines < first and shop[0] == "127.0.0.1", first
    assert len(other) == len(trainers.processes[1].connections) == 1, "the line to process 0, once"
    assert not other & first


def test_the_run_is_whole(finished):
    run, _, versions, _ = finished
    assert versions == ["2", "2"], "both servers hold the last weights"
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [sum(f'"kind": "{kind}"' in line for line in lines) for kind in ("rollout", "update", "sync")] == [2, 4, 2]
    groups = [records.from_json(read_json(p)) for p in sorted(run.glob("rounds/*/groups/*.json"))]
    assert len(groups) >= 4 and all(g.scored for g in groups)
    for group in groups:
        versions = {v for t in group.trajectories for turn in t.turns for v in turn.completion.weight_versions}
        assert versions == {group.index // 2}
    for index in range(2):
        assert {p.stem for p in (run / f"rounds/{index:03d}").glob("*.json")} >= {"bank", "curriculum", "candidates", "cards", "gate", "summary"}
    summary = read_json(run / "summary.json")
    assert len(summary["rounds"]) == 2 and set(summary["test"]) == {"base", "base-initial", "final", "final-full"}
    assert (run / "export/config.json").is_file() and len(list((run / "checkpoints").glob("[0-9]*"))) == 2
