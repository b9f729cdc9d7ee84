import errno
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo import toy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from intraskill.checkpoint import Checkpointer
from intraskill.grpo.loss import CrossEntropy
from intraskill.grpo.packing import Episode, pack
from intraskill.types import InputError

CONFIG = {"num_layers": 4, "hidden_size": 96, "dtype": "float32"}
POSITION = {"round": 1, "step": 7, "rng": 2**100, "bank": [{"id": "price@1", "rho": 0.35}], "note": "größer"}


def make_state(scale=1.0, sharding=None):
    noise = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)  # does not compress: its bytes lie in a file of their own
    state = {"w": scale * jnp.asarray(noise), "n": jnp.asarray(3, jnp.int32), "b": jnp.ones(8, jnp.bfloat16)}
    return state if sharding is None else jax.tree.map(lambda x: jax.device_put(x, sharding if x.ndim else NamedSharding(sharding.mesh, P())), state)


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def saved(path, steps=(1, 2), **options):
    checkpoints = Checkpointer(path, model_config=CONFIG, **options)
    for step in steps:
        checkpoints.save(step, make_state(step), POSITION | {"step": step})
    checkpoints.wait()
    return checkpoints


def data_files(step):
    """The arrays' bytes: the largest files of a step's own data, smallest last."""
    return sorted((p for p in (step / "state").rglob("d/*") if p.is_file()), key=lambda p: -p.stat().st_size)


def test_round_trip_of_the_learners_state(tmp_path):
    learner = toy.learner(CrossEntropy(), learning_rate=0.1)
    batch, _ = pack([Episode([1, 2, 3], [False, True, True])], row_length=8, max_trained_per_row=4)
    state = learner.init(toy.params())
    state, _ = learner.update(state, [batch])
    checkpoints = Checkpointer(tmp_path, model_config=CONFIG)
    checkpoints.save(1, state, POSITION)
    checkpoints.close()
    restored = Checkpointer(tmp_path, model_config=CONFIG).restore(learner.abstract_state(toy.params()))
    assert restored.step == 1 and restored.position == POSITION
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert_equal(restored.state, state)
    (next_a, metrics_a), (next_b, metrics_b) = learner.update(restored.state, [batch]), learner.update(state, [batch])
    assert_equal(next_a, next_b)
    assert metrics_a == metrics_b


@pytest.mark.parametrize(("before", "after"), [(8, 2), (1, 8), (8, 8)])
def test_another_mesh(tmp_path, before, after):
    def sharding(num_devices, axis):
        return NamedSharding(Mesh(np.array(jax.devices()[:num_devices]), ("x",)), axis)

    state = make_state(1.5, sharding(before, P("x")))
    checkpoints = Checkpointer(tmp_path, model_config=CONFIG)
    checkpoints.save(1, state, POSITION)
    target = make_state(0.0, sharding(after, P("x")))
    restored = checkpoints.restore(abstract(target))
    assert_equal(restored.state, state)
    assert restored.state["w"].sharding == target["w"].sharding


def test_keeps_the_last_and_every_nth(tmp_path):
    checkpoints = saved(tmp_path, range(1, 8), keep_last=2, keep_every=3)
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.is_dir()) == [3, 6, 7]
    assert checkpoints.latest() == 7


def intercept(monkeypatch, name, before):
    """Has `before` called when a checkpoint is about to get its name, which makes it complete."""

    def intercepted(original):
        def call(source, target, *arguments, **options):
            if os.path.basename(os.fsdecode(target)) == name:
                before()
            return original(source, target, *arguments, **options)

        return call

    monkeypatch.setattr(os, "rename", intercepted(os.rename))
    monkeypatch.setattr(os, "replace", intercepted(os.replace))


def test_saving_goes_on_while_the_next_update_overwrites_the_state(tmp_path, monkeypatch):
    may_end = threading.Event()
    intercept(monkeypatch, "1", lambda: may_end.wait(60))
    checkpoints = Checkpointer(tmp_path, model_config=CONFIG)
    state = make_state()
    checkpoints.save(1, state, POSITION)
    assert not (tmp_path / "1").exists()
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    jax.block_until_ready(overwrite(state))
    for leaf in jax.tree.leaves(state):
        leaf.delete()  # XLA may have made a new buffer instead of taking a donated one; now none of the old ones is left in any case
    assert state["w"].is_deleted() and not (tmp_path / "1").exists()
    may_end.set()
    checkpoints.wait()
    assert (tmp_path / "1").is_dir()
    assert_equal(checkpoints.restore(abstract(make_state())).state, make_state())


def test_a_checkpoint_that_cannot_be_written_is_one_error_and_costs_no_older_one(tmp_path, monkeypatch, caplog):
    checkpoints = saved(tmp_path, (1,), keep_last=1)

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        intercept(patch, "2", full)
        checkpoints.save(2, make_state(2), POSITION)
        with pytest.raises(InputError, match=r"could not be written \(No space left on device\): check the disk, then resume"):
            checkpoints.wait()
    assert not [r for r in caplog.records if r.exc_info], "Orbax's tracebacks are not for users"
    assert Checkpointer(tmp_path, model_config=CONFIG).restore(abstract(make_state())).step == 1


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, (1,))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="free some space"):
        checkpoints.save(2, make_state(2), POSITION)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]


def test_steps_only_go_up(tmp_path):
    with pytest.raises(ValueError, match="step 2 is not after"):
        saved(tmp_path, (1, 2, 2))


def test_nothing_saved(tmp_path):
    checkpoints = Checkpointer(tmp_path, model_config=CONFIG)
    assert checkpoints.latest() is None
    with pytest.raises(InputError, match="no checkpoint in"):
        checkpoints.restore(abstract(make_state()))


def test_another_model_is_refused_by_name(tmp_path):
    saved(tmp_path).close()
    with pytest.raises(InputError, match=r"num_layers is 4 there and 6 here, .*extra"):
        Checkpointer(tmp_path, model_config={**CONFIG, "num_layers": 6, "with_extra": True}).restore(abstract(make_state()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_other_arrays_are_refused_not_called_corrupt(tmp_path, caplog):
    checkpoints = saved(tmp_path)
    for wanted in (
        make_state() | {"w": jnp.zeros((64, 255))},
        make_state() | {"moment": jnp.zeros(3)},
        make_state() | {"n": jnp.zeros((), jnp.float32)},
    ):
        with pytest.raises(InputError, match="holds other arrays"):
            checkpoints.restore(abstract(wanted))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"] and not caplog.records


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_position(path):
    """Valid JSON, other content."""
    record = json.loads(path.read_text())
    record["position"]["step"] = 99
    path.write_text(json.dumps(record))


CORRUPTIONS = {
    "flipped byte in the arrays": (lambda step: flip(data_files(step)[0]), "checksums differ: ['w']"),
    "truncated array": (lambda step: truncate(data_files(step)[0]), "cannot be read"),
    "missing arrays": (lambda step: shutil.rmtree(step / "state"), "cannot be read"),
    "missing array file": (lambda step: data_files(step)[0].unlink(), "cannot be read"),
    "broken manifest": (lambda step: flip(step / "state" / "manifest.ocdbt"), "cannot be read"),
    "broken array metadata": (lambda step: truncate(step / "state" / "_METADATA"), "cannot be read"),
    "truncated record": (lambda step: truncate(step / "record" / "metadata"), "record cannot be read"),
    "edited record": (lambda step: edit_position(step / "record" / "metadata"), "record's hash"),
    "missing record": (lambda step: shutil.rmtree(step / "record"), "record cannot be read"),
    "empty step": (lambda step: (shutil.rmtree(step), step.mkdir()), "record cannot be read"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_newest_falls_back_with_a_warning(tmp_path, caplog, name):
    corrupt, reason = CORRUPTIONS[name]
    saved(tmp_path).close()
    corrupt(tmp_path / "2")
    checkpoints = Checkpointer(tmp_path, model_config=CONFIG)
    with caplog.at_level(logging.WARNING, logger="intraskill.checkpoint"):
        restored = checkpoints.restore(abstract(make_state()))
    assert restored.step == 1 and restored.position["step"] == 1
    assert_equal(restored.state, make_state(1))
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "intraskill.checkpoint"]
    assert "checkpoint 2 in" in warning and reason in warning and len(warning) < 1000
    checkpoints.save(2, make_state(5), POSITION)  # the run goes on and reaches that step again
    assert_equal(checkpoints.restore(abstract(make_state())).state, make_state(5))
    assert (tmp_path / "2.corrupt").is_dir()


def test_all_corrupt_is_an_error_and_moves_nothing(tmp_path):
    saved(tmp_path).close()
    for step in ("1", "2"):
        flip(data_files(tmp_path / step)[0])
    with pytest.raises(InputError, match=r"all checkpoints .* are corrupt \(step 2: checksums differ: .*; step 1: "):
        Checkpointer(tmp_path, model_config=CONFIG).restore(abstract(make_state()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


KILLED = """
    import os, signal, sys
    import jax.numpy as jnp
    from intraskill.checkpoint import Checkpointer
    import orbax.checkpoint as ocp

    checkpoints = Checkpointer(sys.argv[1], model_config={config})
    state = {{"w": jnp.ones((8, 8), jnp.float32)}}
    checkpoints.save(1, state, {{"step": 1}})
    checkpoints.wait()
    def kill(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)
    {where} = kill
    checkpoints.save(2, state, {{"step": 2}})
    checkpoints.wait()
"""
WHERE = {
    "before the record": "ocp.JsonCheckpointHandler.save = ocp.JsonCheckpointHandler.async_save",
    "before the rename": "os.rename = os.replace",
}


@pytest.mark.parametrize("where", WHERE)
def test_killed_while_saving(tmp_path, where):
    script = textwrap.dedent(KILLED).format(config=CONFIG, where=WHERE[where])
    root = pathlib.Path(__file__).resolve().parent.parent
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()[-2000:]
    # Inside the save: Orbax makes its directory in a thread, so before the record there may be none yet; before the rename there is.
    assert len([p for p in tmp_path.iterdir() if "tmp" in p.name]) in ((1,) if where == "before the rename" else (0, 1))
    assert not (tmp_path / "2").exists()
    checkpoints = Checkpointer(tmp_path, model_config=CONFIG)
    restored = checkpoints.restore(abstract({"w": jnp.zeros((8, 8), jnp.float32)}))
    assert restored.step == 1 and restored.position == {"step": 1}
    checkpoints.save(2, restored.state, {"step": 2})
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("position", [{"a": (1, 2)}, {"a": float("nan")}, {"a": {1: "b"}}, {"a": np.float32(1)}])
def test_a_position_that_json_would_change_is_refused(tmp_path, position):
    with pytest.raises(ValueError, match="position must"):
        Checkpointer(tmp_path, model_config=CONFIG).save(1, make_state(), position)
    assert list(tmp_path.iterdir()) == []


def test_bad_options(tmp_path):
    with pytest.raises(InputError, match="keep_last is 0"):
        Checkpointer(tmp_path, model_config=CONFIG, keep_last=0)
