import asyncio
import contextlib
import dataclasses
import json
import pathlib
import resource
import shutil
import types

import jax
import numpy as np
import pytest
from rollout import models

from intraskill import manifest, weights
from intraskill.models.qwen35 import hf
from intraskill.types import InputError
from intraskill.weights import WeightsError

CONFIG = models.config(param_dtype="bfloat16")


@pytest.fixture(scope="module")
def params():
    return models.params(CONFIG)


@pytest.fixture
def published(tmp_path, params):
    return weights.publish(tmp_path / "weights", 3, CONFIG, params)


def nudge(params):
    """The same parameters, one bf16 ulp up in one element of one tensor."""
    bits = np.array(params["final_norm"]).view(np.uint16).copy()
    bits[5] += 1
    return {**params, "final_norm": jax.numpy.asarray(bits.view(jax.numpy.bfloat16))}


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y)), a, b))


def test_what_is_read_is_what_was_published(published, params):
    assert published.version == 3 and pathlib.Path(published.path).name == "00000003"
    assert equal(weights.read(published, CONFIG), params)
    assert weights.digest_of(CONFIG, weights.read(published, CONFIG)) == published.digest == weights.digest_of(CONFIG, params)


def test_the_manifest_names_every_tensor_as_published(published):
    manifest = json.loads((pathlib.Path(published.path) / "manifest.json").read_text())
    assert manifest["version"] == 3 and manifest["digest"] == published.digest
    entry = manifest["tensors"]["model.layers.1.self_attn.q_proj.weight"]
    assert entry["shape"] == [2 * 2 * 16, 32] and entry["dtype"] == "bfloat16" and len(entry["sha256"]) == 64


def test_digest_covers_name_shape_dtype_and_every_bit():
    x = np.arange(6, dtype=np.float32)
    base = manifest.digest_of([("a", x), ("b", x)])
    assert manifest.digest_of([("b", x), ("a", x)]) == base  # order of the stream does not matter
    others = [
        [("a", x), ("c", x)],
        [("a", x), ("b", x.reshape(2, 3))],
        [("a", x), ("b", x.view(np.int32))],
        [("a", x), ("b", np.nextafter(x, np.float32(9)))],
        [("a", x)],
    ]
    assert len({base, *(manifest.digest_of(o) for o in others)}) == 6
    assert manifest.digest_of([("a", np.ones((3, 2), np.float32).T)]) == manifest.digest_of(
        [("a", np.ones((2, 3), np.float32))]
    )  # content, not memory layout


def test_one_ulp_is_another_digest_and_a_skipped_load_shows(tmp_path, published, params):
    other = weights.publish(tmp_path / "weights", 4, CONFIG, nudge(params))
    assert other.digest != published.digest
    # an engine that claims version 4 and still holds version 3
    held = weights.read(published, CONFIG)
    assert weights.digest_of(CONFIG, held) != other.digest
    assert weights.digest_of(CONFIG, weights.read(other, CONFIG)) == other.digest


def test_publishing_again_is_fine_only_with_the_same_weights(tmp_path, published, params):
    assert weights.publish(tmp_path / "weights", 3, CONFIG, params) == published
    with pytest.raises(WeightsError, match="already holds other weights.*new version"):
        weights.publish(tmp_path / "weights", 3, CONFIG, nudge(params))


def test_a_publication_killed_before_its_manifest_does_not_exist_and_is_replaced(tmp_path, published, params):
    (pathlib.Path(published.path) / "manifest.json").unlink()
    with pytest.raises(WeightsError, match="never completely published"):
        weights.read(published, CONFIG)
    assert weights.publish(tmp_path / "weights", 3, CONFIG, nudge(params)).digest != published.digest


@contextlib.contextmanager
def disk_full_after(num_bytes: int):
    """Writes of this process fail, by the kernel, in files that would grow beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_a_disk_that_fills_up_while_publishing_leaves_no_version_and_one_error(tmp_path, params, layout):
    weights.publish(tmp_path, 1, CONFIG, params, layout=layout)
    with disk_full_after(4096), pytest.raises(InputError, match="could not be written .*check the disk's space"):
        weights.publish(tmp_path, 2, CONFIG, nudge(params), layout=layout)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    again = weights.publish(tmp_path, 2, CONFIG, nudge(params), layout=layout)
    assert weights.digest_of(CONFIG, weights.read(again, CONFIG)) == again.digest


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, params, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="free some space"):
        weights.publish(tmp_path, 1, CONFIG, params)
    assert not list(tmp_path.iterdir())


def test_a_publication_interrupted_while_writing_leaves_nothing(tmp_path, params, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.publish(tmp_path, 1, CONFIG, params)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_published_in_bfloat16_for_engines_that_hold_that(tmp_path, layout):
    """The decay rates stay float32; everything is rounded once; what a float32 model reads digests as what was published."""
    config = models.config()
    params = models.params(config)
    published = weights.publish(tmp_path, 1, config, params, dtype="bfloat16", layout=layout)
    entries = manifest.read(pathlib.Path(published.path))["tensors"]
    assert {n for n, e in entries.items() if e["dtype"] == "float32"} == {"model.layers.0.linear_attn.A_log"}
    held = weights.read(published, config)
    np.testing.assert_array_equal(held["embed"], np.asarray(params["embed"].astype("bfloat16")).astype(np.float32))
    weights.verify(published, config, held)
    changed = {**held, "final_norm": held["final_norm"].at[2].add(2**-20)}  # smaller than bfloat16 can tell
    with pytest.raises(WeightsError, match="loaded parameters have digest"):
        weights.verify(published, config, changed)


def test_forms_that_nothing_can_load(tmp_path, params):
    with pytest.raises(InputError, match="orbax or safetensors, in float32 or bfloat16; got 'torch', None"):
        weights.publish(tmp_path, 1, CONFIG, params, layout="torch")
    with pytest.raises(InputError, match="got 'orbax', 'float16'"):
        weights.publish(tmp_path, 1, CONFIG, params, dtype="float16")


def test_the_same_weights_in_the_other_layout_replace_the_first(tmp_path, params):
    one, two = (weights.publish(tmp_path, 1, CONFIG, params, layout=layout) for layout in weights.LAYOUTS)
    assert one == two and manifest.read(pathlib.Path(two.path))["layout"] == "safetensors"
    assert equal(weights.read(two, CONFIG), params)


def stored_at(published, tensor):
    """Where the bytes of `tensor` lie: (file, offset). A file of OCDBT also holds what no reader reads, so damage must be aimed."""
    data = np.ascontiguousarray(tensor).tobytes()
    for file in pathlib.Path(published.path, "arrays").rglob("*"):
        if file.is_file() and (offset := file.read_bytes().find(data)) >= 0:
            yield file, offset


def test_a_file_truncated_after_the_commit_marker(published, params):
    for file, offset in list(stored_at(published, params["embed"])):
        file.write_bytes(file.read_bytes()[: offset + 5])
    with pytest.raises(WeightsError, match="publish again"):
        weights.read(published, CONFIG)


def test_a_flipped_bit_in_any_tensor(published):
    for name, tensor in hf.to_hf_tensors(CONFIG, weights.read(published, CONFIG)):
        if tensor.nbytes <= 1024:
            continue  # OCDBT packs small values into its compressed index, where every byte is checked anyway
        places = list(stored_at(published, tensor))
        assert places, name
        for file, offset in places:
            data = bytearray(file.read_bytes())
            data[offset + tensor.nbytes // 2] ^= 1
            file.write_bytes(data)
        with pytest.raises(WeightsError, match="publish again"):
            weights.read(published, CONFIG)
        for file, offset in places:
            data[offset + tensor.nbytes // 2] ^= 1
            file.write_bytes(data)
    weights.read(published, CONFIG)


def test_arrays_of_another_version_under_this_manifest(tmp_path, published, params):
    other = weights.publish(tmp_path / "weights", 4, CONFIG, nudge(params))
    here, there = pathlib.Path(published.path, "arrays"), pathlib.Path(other.path, "arrays")
    here.rename(tmp_path / "gone")
    there.rename(here)
    with pytest.raises(WeightsError, match="1 tensors are not what the manifest says, the first is model.norm.weight"):
        weights.read(published, CONFIG)


def edit(published, change):
    path = pathlib.Path(published.path) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_manifest_that_was_edited(published):
    edit(published, lambda m: m["tensors"].pop("model.norm.weight"))
    with pytest.raises(WeightsError, match="contradicts its own digest"):
        weights.read(published, CONFIG)


def test_a_manifest_that_is_no_json(published):
    (pathlib.Path(published.path) / "manifest.json").write_text('{"schema": 1, "ten')
    with pytest.raises(WeightsError, match="not valid JSON"):
        weights.read(published, CONFIG)


def test_another_version_or_digest_than_asked(published):
    with pytest.raises(WeightsError, match="holds version 3, asked for was 4"):
        weights.read(dataclasses.replace(published, version=4), CONFIG)
    with pytest.raises(WeightsError, match="asked for was beef"):
        weights.read(dataclasses.replace(published, digest="beef"), CONFIG)


def test_another_models_names_shapes_or_dtypes(published, tmp_path):
    with pytest.raises(WeightsError, match=r"missing layers\.2"):
        weights.read(published, models.config(param_dtype="bfloat16", num_layers=4))
    with pytest.raises(WeightsError, match=r"embed_tokens.weight is \[96, 32\], expected \[48, 32\]"):
        weights.read(published, models.config(param_dtype="bfloat16", vocab_size=48))
    wide = models.config()
    other = weights.publish(tmp_path / "wide", 3, wide, models.params(wide))
    with pytest.raises(WeightsError, match="holds float32, the model's parameters are bfloat16"):
        weights.read(other, CONFIG)


def test_prune_keeps_what_is_served(tmp_path, params, published):
    directory = tmp_path / "weights"
    for version in (4, 5):
        weights.publish(directory, version, CONFIG, params)
    (directory / "notes").mkdir()
    assert weights.prune(directory, keep={4}) == [3, 5]
    assert sorted(p.name for p in directory.iterdir()) == ["00000004", "notes"]
    assert weights.prune(tmp_path / "nowhere", keep=()) == []


async def test_publishing_and_reading_work_inside_a_running_loop_and_off_its_thread(tmp_path, params):
    published = weights.publish(tmp_path, 0, CONFIG, params)
    assert equal(await asyncio.to_thread(weights.read, published, CONFIG), params)
