"""Exports against transformers itself, text-only and multimodal, and launch/compare_hf.py on them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import checkpoints, tiny
from safetensors.numpy import load_file, save_file

from intraskill.models.qwen35 import hf
from intraskill.types import InputError
from launch import compare_hf

torch = pytest.importorskip("torch")
qwen = pytest.importorskip("transformers.models.qwen3_5")

pytestmark = [pytest.mark.torch, pytest.mark.loose_numerics]  # the launcher runs without strict promotion

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """A checkpoint as transformers writes one, with the multi-token prediction tensors that it leaves out added to a shard."""
    directory = tmp_path_factory.mktemp("multimodal") / "published"
    config = tiny.config("two_values_a_key")
    text = {key: value for key, value in config.to_hf().items() if key not in ("architectures", "full_attention_interval", "model_type")}
    vision = {**VISION, "out_hidden_size": config.hidden_size}
    whole = qwen.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=1, video_token_id=2)
    torch.manual_seed(0)
    model = qwen.Qwen3_5ForConditionalGeneration(whole)
    with torch.no_grad():  # the usual initial values are so small that the layers hardly show in logits and gradients
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model = model.to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="40KB")
    file = sorted(directory.glob("*.safetensors"))[-1]
    save_file({**load_file(file), "mtp.fc.weight": np.ones((3, 4), np.float32)}, file, metadata={"format": "pt"})
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.fc.weight"] = file.name
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def assert_complete(report):
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert not set(report["unexpected_keys"]) - {"mtp.fc.weight"}


def test_a_trained_multimodal_export_loads_whole(multimodal, tmp_path):
    hf.import_hf(multimodal, tmp_path / "imported")
    config, params = hf.load_hf(tmp_path / "imported")
    trained = jax.tree.map(lambda x: x * jnp.float32(0.5), params)
    hf.save_hf(tmp_path / "out", config, trained, source=tmp_path / "imported")
    kinds = qwen.Qwen3_5ForConditionalGeneration
    before = kinds.from_pretrained(multimodal, dtype="auto").state_dict()
    model, report = kinds.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert_complete(report)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        scale = 1 if ".visual." in name else 0.5
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor * scale), name
    assert model.config.text_config.full_attention_interval == 2


def test_a_multimodal_export_loads_as_text_with_our_logits(multimodal, tmp_path):
    hf.import_hf(multimodal, tmp_path / "imported")
    hf.export_imported(tmp_path / "imported", tmp_path / "out")
    reference, report = qwen.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert_complete(report)
    config, params = hf.load_hf(tmp_path / "out", chunk_size=16)
    tokens = tiny.tokens(config, 2, 20)
    positions, segments = tiny.pack([[20], [20]], 20)
    ours = tiny.forward(params, config, tokens, positions, segments)
    with torch.no_grad():
        theirs = reference.model(torch.tensor(tokens, dtype=torch.long)).last_hidden_state.numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=0)


# ------------------------------------------------------------------------------------------------------------ compare_hf


def test_compare_finds_every_figure_in_tolerance(multimodal, capsys):
    found = compare_hf.compare(multimodal, 0)
    assert len(found) == 6
    assert compare_hf.report(found) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(line.endswith("ok") or " ok model." in line for line in lines), lines


def test_compare_finds_what_is_out_of_tolerance(multimodal, monkeypatch, capsys):
    load = hf.load_hf

    def slightly_wrong(directory):
        config, params = load(directory)
        params["layers"]["0"]["linear"]["a_log"] += jnp.float32(0.5)
        return config, params

    monkeypatch.setattr(hf, "load_hf", slightly_wrong)
    found = compare_hf.compare(multimodal, 0)
    assert [figure.ok for figure in found[:3]] == [False, False, False]
    assert found[4].ok and found[5].ok  # our own forms still agree with each other
    assert compare_hf.report(found) == 1
    assert capsys.readouterr().out.count("OUT OF TOLERANCE") >= 3


def test_compare_refuses_an_import(multimodal, tmp_path):
    hf.import_hf(multimodal, tmp_path / "imported")
    with pytest.raises(InputError, match="is an imported directory, which transformers cannot load"):
        compare_hf.compare(tmp_path / "imported", 0)


def test_text_only_float32_and_bfloat16(tmp_path):
    config = tiny.config("three_values_a_key")
    for dtype in ("float32", "bfloat16"):
        hf.save_hf(tmp_path / dtype, config, checkpoints.params(config), dtype, shard_bytes=20_000)
        hf.import_hf(tmp_path / dtype, tmp_path / f"{dtype}-imported")
        hf.export_imported(tmp_path / f"{dtype}-imported", tmp_path / f"{dtype}-out")
        _, report = qwen.Qwen3_5ForCausalLM.from_pretrained(tmp_path / f"{dtype}-out", dtype="auto", output_loading_info=True)
        assert_complete(report)
        assert not report["unexpected_keys"]
