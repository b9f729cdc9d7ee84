import asyncio
import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from rollout import models

from intraskill import weights
from intraskill.models.qwen35 import hf
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
    base = weights.digest([("a", x), ("b", x)])
    assert weights.digest([("b", x), ("a", x)]) == base  # order of the stream does not matter
    others = [
        [("a", x), ("c", x)],
        [("a", x), ("b", x.reshape(2, 3))],
        [("a", x), ("b", x.view(np.int32))],
        [("a", x), ("b", np.nextafter(x, np.float32(9)))],
        [("a", x)],
    ]
    assert len({base, *(weights.digest(o) for o in others)}) == 6
    assert weights.digest([("a", np.ones((3, 2), np.float32).T)]) == weights.digest(
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


def test_a_full_disk_while_publishing_leaves_no_version(tmp_path, params, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.ocp.Checkpointer, "save", full)
    with pytest.raises(OSError, match="No space left"):
        weights.publish(tmp_path, 1, CONFIG, params)
    assert not (tmp_path / "00000001" / "manifest.json").exists()


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


def test_another_models_names_shapes_or_dtypes(published):
    with pytest.raises(WeightsError, match=r"missing layers\.2"):
        weights.read(published, models.config(param_dtype="bfloat16", num_layers=4))
    with pytest.raises(WeightsError, match=r"embed_tokens.weight is \[96, 32\], expected \[48, 32\]"):
        weights.read(published, models.config(param_dtype="bfloat16", vocab_size=48))
    with pytest.raises(WeightsError, match="holds bfloat16, the model's parameters are float32"):
        weights.read(published, models.config())


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
