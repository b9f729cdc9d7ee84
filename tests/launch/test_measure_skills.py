"""launch/measure_skills.py: its coefficients are least squares of what it played, a masked episode less its task's mean bare success."""

import json

import numpy as np
import pytest


def episodes(path):
    return [json.loads(line) for line in (path / "episodes.jsonl").read_text().splitlines()]


def test_measures_once_and_by_least_squares(launcher, tmp_path):
    settings = {"runs_directory": tmp_path, "name": "x", "shop.train": 20}
    command = ["launch/measure_skills.py", "--config=configs/pocket.py:smoke", *(f"--config.{k}={v}" for k, v in settings.items()), "--samples=2"]
    first = launcher.start(*command)
    assert first.wait() == 1, first.stderr[-2000:]  # so few pairs cannot bound a placebo's effect: a target is missed
    assert first.stdout.splitlines()[-1].endswith("missed")
    directory = tmp_path / "x-skills"
    found = json.loads((directory / "skills.json").read_text())
    bare = episodes(directory / "bare")
    assert len(bare) == 40 and not any(e["injected"] for e in bare)
    assert {e["success"] for e in bare} == {True, False}, "the committed policy succeeds now and then"
    mean = {task: np.mean([e["success"] for e in bare if e["task_id"] == task]) for task in {e["task_id"] for e in bare}}
    table = np.array([[e["success"] for e in bare if e["sample"] == sample] for sample in (0, 1)], float)  # both in the order of tasks
    assert found["repetitions"]["spread"] == pytest.approx(abs(table[0].mean() - table[1].mean()) / np.sqrt(2))
    assert found["repetitions"]["expected"] == pytest.approx(np.sqrt((table[0] != table[1]).mean() / 2 / table.shape[1]))
    for wording, name in (("seen", "@1"), ("held_out", "")):
        masked = episodes(directory / wording)
        ids = [row[wording]["id"] for row in found["mechanisms"]]
        assert all(name in i for i in ids)
        design = np.array([[float(i in e["injected"]) for i in ids] for e in masked])
        delta = np.array([e["success"] - mean[e["task_id"]] for e in masked])
        expected = np.linalg.lstsq(design, delta, rcond=None)[0]
        assert [row[wording]["coefficient"] for row in found["mechanisms"]] == pytest.approx(expected, abs=1e-9)
    for row in found["mechanisms"]:  # an interval of 90% lies inside that of 95%, about the coefficient
        low, high = row["interval90"]
        assert high - low == pytest.approx((row["seen"]["high"] - row["seen"]["low"]) * 1.6448536 / 1.9599640, rel=1e-6)
        assert (low + high) / 2 == pytest.approx(row["seen"]["coefficient"], abs=1e-9)
    written = (directory / "seen/episodes.jsonl").stat().st_mtime_ns
    again = launcher.start(*command)
    assert again.wait() == 1 and (directory / "seen/episodes.jsonl").stat().st_mtime_ns == written, "complete conditions are read"
    assert json.loads((directory / "skills.json").read_text()) == found
