"""A round of the pod's own command against a real SGLang: two training processes, the pocket checkpoint."""

import os
import subprocess
import sys

import pytest
from distributed import card, job
from rollout.served import FIGURES
from sglang_cpu import serve

from intraskill.rollout import records
from intraskill.run_directory import read_json

pytestmark = pytest.mark.timeout(3600)


def test_a_round_of_the_pods_command(served, tmp_path):
    address, environment = job.coordinator(), {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    commands = [
        [sys.executable, "launch/train.py", *card.flags(tmp_path, [served.address], schedule__rounds=1), *job.place(address, 2, i)] for i in (0, 1)
    ]
    logs = [(tmp_path / f"process{i}").open("w+") for i in (0, 1)]
    processes = [subprocess.Popen(c, cwd=serve.ROOT, env=environment, stdout=log, stderr=log) for c, log in zip(commands, logs, strict=True)]
    statuses = [p.wait() for p in processes]
    said = [(tmp_path / f"process{i}").read_text()[-4000:] for i in (0, 1)]
    assert statuses == [0, 0], said
    run = tmp_path / "coevolve"
    groups = [records.from_json(read_json(p)) for p in sorted(run.glob("rounds/*/groups/*.json"))]
    assert len(groups) >= 2 and all(g.scored for g in groups)
    assert {v for g in groups for t in g.trajectories for turn in t.turns for v in turn.completion.weight_versions} == {0}
    assert read_json(run / "summary.json")["rounds"][0]["round"] == 0 and (run / "export/config.json").is_file()
    FIGURES["one round of configs/coevolve.py over two training processes: episodes"] = str(sum(len(g.trajectories) for g in groups))
