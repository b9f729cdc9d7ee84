"""Hugging Face -> Orbax -> (training) -> Hugging Face: what must come back as it was, and what damage is noticed."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from models import checkpoints, tiny
from safetensors.numpy import load_file, save_file

from intraskill.models.qwen35 import hf, hf_directory
from intraskill.types import InputError


def tensors_of(directory):
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        np.testing.assert_array_equal(tensor.reshape(-1).view(np.uint8), b[name].reshape(-1).view(np.uint8), err_msg=name)


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def config():
    return tiny.config("two_values_a_key")


@pytest.fixture
def published(tmp_path, config):
    checkpoints.multimodal(tmp_path / "published", config)
    return tmp_path / "published"


@pytest.fixture
def imported(tmp_path, published):
    hf.import_hf(published, tmp_path / "imported")
    return tmp_path / "imported"


# ------------------------------------------------------------------------------------------------------------- unchanged


@pytest.mark.parametrize("shape", ["two_values_a_key", "three_values_a_key", "two_full_layers"])
def test_a_multimodal_checkpoint_comes_back_byte_for_byte(tmp_path, shape):
    tensors = checkpoints.multimodal(tmp_path / "published", tiny.config(shape))
    hf.import_hf(tmp_path / "published", tmp_path / "imported")
    shutil.move(tmp_path / "published", tmp_path / "elsewhere")  # nothing of the source is needed any more
    hf.export_imported(tmp_path / "imported", tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors)
    before, after = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (tmp_path / "elsewhere", tmp_path / "out"))
    for name in [*(n for n in before if n.endswith(".safetensors")), "tokenizer.json", "preprocessor_config.json"]:
        assert after[name] == before[name], name
    assert after.keys() == before.keys() - {"README.md"}
    index, original = (json.loads(d["model.safetensors.index.json"]) for d in (after, before))
    assert index == original


def test_config_json_gets_the_interval_and_keeps_the_rest(tmp_path, imported, published):
    hf.export_imported(imported, tmp_path / "out")
    expected = json.loads((published / "config.json").read_text())
    expected["text_config"]["full_attention_interval"] = 2
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected


def test_a_text_only_checkpoint_comes_back_byte_for_byte(tmp_path):
    config = tiny.config("three_to_one")
    hf.save_hf(tmp_path / "published", config, checkpoints.params(config), shard_bytes=30_000)
    hf.import_hf(tmp_path / "published", tmp_path / "imported")
    hf.export_imported(tmp_path / "imported", tmp_path / "out")
    before, after = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (tmp_path / "published", tmp_path / "out"))
    assert before == after


def test_a_spelled_out_head_of_tied_embeddings_is_left_out(tmp_path, config):
    hf.save_hf(tmp_path / "published", config, checkpoints.params(config))
    file = tmp_path / "published" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, file, metadata={"format": "pt"})
    hf.import_hf(tmp_path / "published", tmp_path / "imported")
    hf.export_imported(tmp_path / "imported", tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors)


def test_a_head_that_differs_from_tied_embeddings_is_not_dropped_in_silence(tmp_path, config):
    hf.save_hf(tmp_path / "published", config, checkpoints.params(config))
    file = tmp_path / "published" / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    for read in (hf.load_hf, lambda directory: hf.import_hf(directory, tmp_path / "imported")):
        with pytest.raises(InputError, match="ties the embeddings, but lm_head.weight is another matrix than model.embed_tokens.weight"):
            read(tmp_path / "published")
    assert [p.name for p in tmp_path.iterdir()] == ["published"]


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_kinds_of_directory_load_alike(imported, published, scan, dtype):
    loaded = [hf.load_hf(directory, scan_layers=scan, param_dtype=dtype) for directory in (published, imported)]
    assert loaded[0][0] == loaded[1][0]
    assert_equal_trees(loaded[0][1], loaded[1][1])
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded[1][1]["layers"]["0"]["mlp"])} == {dtype}
    embed = tensors_of(published)["model.language_model.embed_tokens.weight"]
    np.testing.assert_array_equal(loaded[1][1]["embed"], embed.astype(dtype))


def test_orbax_itself_restores_an_import_onto_a_mesh(imported, published):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        path = imported / hf_directory.PARAMS
        tree = checkpointer.metadata(path).item_metadata.tree
        wanted = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())), tree)
        wanted["embed"] = ocp.ArrayRestoreArgs(sharding=cut, dtype=jnp.float32)
        restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=wanted))
    _, params = hf.load_hf(published)
    assert restored["embed"].sharding == cut
    assert restored["layers"]["0"]["linear"]["a_log"].dtype == jnp.float32 and restored["layers"]["0"]["mlp"]["down"].dtype == jnp.bfloat16
    assert_equal_trees(jax.tree.map(np.asarray, jax.tree.map(lambda x: x.astype(jnp.float32), restored)), params)


# --------------------------------------------------------------------------------------------------------------- trained


@pytest.mark.parametrize("kind", ["published", "imported"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_trained_weights_go_out_beside_untouched_towers(tmp_path, request, kind, dtype):
    source = request.getfixturevalue(kind)
    original = tensors_of(request.getfixturevalue("published"))
    config, params = hf.load_hf(source)
    trained = jax.tree.map(lambda x: x + jnp.float32(1), params)
    hf.save_hf(tmp_path / "out", config, trained, dtype, source=source)
    written = tensors_of(tmp_path / "out")
    assert written.keys() == original.keys()
    assert_same_tensors({n: written[n] for n in checkpoints.TOWERS}, checkpoints.TOWERS)
    for name in original.keys() - checkpoints.TOWERS.keys():
        expected = original[name].astype(np.float32) + 1
        kept = original[name].dtype == np.float32 or dtype == "float32"
        assert str(written[name].dtype) == ("float32" if kept else "bfloat16"), name
        np.testing.assert_array_equal(written[name], expected.astype(written[name].dtype), err_msg=name)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == ["Qwen3_5ForConditionalGeneration"] and content["vision_config"] == {"depth": 1, "hidden_size": 8}
    assert content["text_config"]["dtype"] == (dtype or "bfloat16")
    assert (tmp_path / "out" / "preprocessor_config.json").exists()
    assert "stale" not in (tmp_path / "out" / "config.json").read_text() and "not trained" in (tmp_path / "out" / hf.MTP_NOTE).read_text()


def test_a_source_of_another_model_is_refused(tmp_path, published):
    other = tiny.config("two_values_a_key", rope_theta=5e5, intermediate_size=64)
    with pytest.raises(InputError, match="is another model than the parameters.*intermediate_size is 48 there, 64 here.*500000") as caught:
        hf.save_hf(tmp_path / "out", other, checkpoints.params(other), source=published)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_parameters_that_are_not_the_configs_are_listed(tmp_path, config):
    params = checkpoints.params(config)
    params["embed"] = params["embed"][:-1]
    params["layers"]["1"]["full"]["extra"] = params["final_norm"]
    del params["layers"]["0"]["linear"]["conv"]
    with pytest.raises(InputError, match="3 parameters are not the config's") as caught:
        hf.save_hf(tmp_path / "out", config, params)
    for words in (r"embed is (79, 32), expected (80, 32)", "layers.0.linear.conv is absent", "layers.1.full.extra is (32,), expected absent"):
        assert words in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------- damage


def flip(file, offset=-1):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def flip_in_arrays(directory):
    """One bit of `embed`, found by its bytes."""
    embed = tensors_of(directory.with_name("published"))["model.language_model.embed_tokens.weight"].tobytes()
    for file in (directory / "params").rglob("*"):
        if file.is_file() and (start := file.read_bytes().find(embed)) >= 0:
            return flip(file, start + 100)
    raise AssertionError("the array's bytes are in no file")


def edit(file, **changes):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in {**content, **changes}.items() if value is not None}))


DAMAGE = {
    "flipped parameter": (flip_in_arrays, "embed (is not what was imported|cannot be read)"),
    "lost parameters": (lambda d: shutil.rmtree(d / "params"), "embed cannot be read"),
    "flipped tower": (lambda d: flip(d / "towers.safetensors"), "sha256 differs"),
    "lost towers": (lambda d: (d / "towers.safetensors").unlink(), "towers.safetensors"),
    "truncated towers": (lambda d: (d / "towers.safetensors").write_bytes((d / "towers.safetensors").read_bytes()[:-1]), "truncated"),
    "broken record": (lambda d: (d / "published.json").write_text("{"), "not readable as JSON"),
    "foreign record": (lambda d: edit(d / "published.json", schema=99), "schema is 99"),
    "record without shards": (lambda d: edit(d / "published.json", shards=None), "not the record of an import"),
    "record of nothing": (lambda d: edit(d / "published.json", parameters={}), "another parameter layout"),
    "other towers": (lambda d: edit(d / "published.json", towers={"mtp.x": ""}), "other tensors than were imported"),
    "lost config": (lambda d: (d / "config.json").unlink(), "no such file"),
    "Hugging Face directory": (lambda d: (d / "published.json").unlink(), "only safetensors checkpoints"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_import_is_not_exported(tmp_path, imported, name):
    damage, message = DAMAGE[name]
    damage(imported)
    with pytest.raises(InputError, match=message) as caught:
        hf.export_imported(imported, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} == {"published", "imported"}


def test_wrong_directories_are_named(tmp_path, imported, published):
    with pytest.raises(InputError, match="exists already"):
        hf.import_hf(published, imported)
    with pytest.raises(InputError, match="exists already"):
        hf.export_imported(imported, published)
    with pytest.raises(InputError, match="is an imported directory already"):
        hf.import_hf(imported, tmp_path / "out")
    with pytest.raises(InputError, match="is not an imported directory"):
        hf.export_imported(published, tmp_path / "out")
    with pytest.raises(InputError, match="nowhere: no such directory"):
        hf.import_hf(tmp_path / "nowhere", tmp_path / "out")


def test_loading_says_what_it_leaves_out(imported, caplog):
    with caplog.at_level(logging.INFO):
        hf.load_hf(imported)
    assert "left out 4 tensors of other towers" in caplog.text


# ---------------------------------------------------------------------------------------------------- foreign checkpoints


def replace_tensor(directory, name, tensor):
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file({**tensors, name: tensor}, file)


def rename_in_index(directory):
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("mtp.fc.weight", "mtp.gone.weight"))


FOREIGN = {
    "other dtype": (
        lambda d: replace_tensor(d, "model.language_model.norm.weight", np.zeros(32, np.float16)),
        "model.language_model.norm.weight is F16, expected F32 or BF16",
    ),
    "index of other tensors": (rename_in_index, "index and shards disagree about mtp.fc.weight, mtp.gone.weight"),
    "path in the index": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../published/x.safetensors"}}'),
        "holds no weight_map from tensor names to names of safetensors files",
    ),
    "no shards at all": (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {}}'), "lacks weights"),
    "index that is a list": (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "expected an object"),
    "both prefixes": (
        lambda d: shutil.copy(d / "model.safetensors-00001-of-00003.safetensors", d / "model.safetensors-00002-of-00003.safetensors"),
        "is in another shard too",
    ),
    "quantised": (lambda d: edit(d / "config.json", quantization_config={"quant_method": "fp8"}), "quantization_config"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_checkpoints_are_not_imported(tmp_path, published, name):
    damage, message = FOREIGN[name]
    damage(published)
    with pytest.raises(InputError, match=message) as caught:
        hf.import_hf(published, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} == {"published"}
