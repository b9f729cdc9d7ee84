"""Our loader inside SGLang, on a model with SGLang's parameters; the real server is tested by `make test-sglang`."""

import json
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from rollout import models

from intraskill import manifest, weights
from intraskill.models.qwen35 import hf

pytestmark = pytest.mark.torch

# Two key-value heads fewer than ranks are not needed to see replication: one head, two ranks. The vocabulary of 96 is padded to 128.
CONFIG = models.config(tie_embeddings=False)


@pytest.fixture(scope="module")
def params():
    return models.params(CONFIG)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, params):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    hf.save_hf(path, CONFIG, params, "bfloat16")
    return path


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """So that a tensor of a tiny model lies in several pieces, as a large one does."""
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 512)


def publish(tmp_path, version, params, **changes):
    return weights.publish(tmp_path / "weights", version, CONFIG, params, dtype="bfloat16", **changes)


def nudge(params):
    bits = np.asarray(params["final_norm"].astype("bfloat16")).view(np.uint16).copy()
    bits[5] += 1
    return {**params, "final_norm": jax.numpy.asarray(bits.view(jax.numpy.bfloat16)).astype("float32")}


@pytest.fixture
def server(checkpoint):
    """A model as SGLang holds it, and functions that do what its routes do."""
    import torch
    from rollout import sglang_like

    from intraskill.rollout import sglang_loader

    model = sglang_like.Model(sglang_like.text_config(checkpoint))

    def load(path, kind=sglang_loader.PATH):
        sglang_loader.load(model, [(kind, torch.tensor(list(str(path).encode()), dtype=torch.uint8))])
        return sglang_like.ask(model)

    return model, load


def bits(model):
    import torch

    return {name: p.detach().reshape(-1).view(torch.uint8).numpy().copy() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_the_live_parameters_digest_as_the_manifest_says(server, tmp_path, params):
    _, load = server
    one, two = publish(tmp_path, 1, params), publish(tmp_path, 2, nudge(params))
    assert load(one.path) == {"digest": one.digest, "error": ""}
    assert load(two.path) == {"digest": two.digest, "error": ""} and one.digest != two.digest


def test_the_digest_is_of_what_lives_now(server, tmp_path, params):
    model, load = server
    one = publish(tmp_path, 1, params)
    load(one.path)
    from rollout import sglang_like

    for parameter in model.parameters():
        data = parameter.data.reshape(-1)
        kept = data[0].clone()
        data[0] = kept + 1
        assert sglang_like.ask(model)["digest"] != one.digest
        data[0] = kept
    assert sglang_like.ask(model)["digest"] == one.digest


def test_comparing_only_loads_nothing(server, tmp_path, params):
    model, load = server
    before = bits(model)
    said = load(publish(tmp_path, 1, params).path, "attach")
    assert same(bits(model), before) and said["error"] == "" and said["digest"] != publish(tmp_path, 1, params).digest


def edited(published, change):
    path = pathlib.Path(published.path)
    content = json.loads((path / manifest.FILE).read_text())
    (path / manifest.FILE).write_text(json.dumps(manifest.make(content["version"], content["layout"], change(content["tensors"]))))
    return path


def _without(entries, part):
    return {n: e for n, e in entries.items() if part not in n}


def _with_shape(entries, part, shape):
    return {n: {**e, "shape": shape} if part in n else e for n, e in entries.items()}


BROKEN = {
    "missing embed_tokens.weight": lambda e: {f"base.{n}": v for n, v in e.items()},
    "missing layers.1.mlp.up_proj.weight": lambda e: _without(e, "layers.1."),
    "is [47, 32], expected [48, 32]": lambda e: _with_shape(e, "gate_proj", [47, 32]),
    "is float16, the server holds bfloat16": lambda e: {n: {**v, "dtype": "float16"} for n, v in e.items()},
    "is bfloat16, the server holds float32": lambda e: {n: {**v, "dtype": "bfloat16"} for n, v in e.items()},
    "unexpected model.layers.7.mlp.up_proj.weight": lambda e: {**e, "model.layers.7.mlp.up_proj.weight": next(iter(e.values()))},
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_does_not_fit_is_refused_before_the_model_is_touched(server, tmp_path, params, message):
    model, load = server
    before = bits(model)
    said = load(edited(publish(tmp_path, 1, params), BROKEN[message]))
    assert message in said["error"] and "Nothing was loaded" in said["error"] and said["digest"] == ""
    assert same(bits(model), before)


def test_damaged_files_leave_the_model_as_it_was(server, tmp_path, params):
    model, load = server
    good = publish(tmp_path, 1, params)
    load(good.path)
    before = bits(model)
    broken = publish(tmp_path, 2, nudge(params))
    for file in pathlib.Path(broken.path, "arrays").rglob("*"):
        if file.is_file() and file.stat().st_size > 2048:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert load(broken.path)["error"]
    (pathlib.Path(good.path) / manifest.FILE).rename(tmp_path / "gone")
    assert "never completely published" in load(good.path)["error"]
    (tmp_path / "gone").rename(pathlib.Path(good.path) / manifest.FILE)
    assert "holds safetensors" in load(publish(tmp_path, 3, params, layout="safetensors").path)["error"]
    assert "unknown request 'evil'" in load(good.path, "evil")["error"]
    assert same(bits(model), before)
    assert load(good.path) == {"digest": good.digest, "error": ""}, "and a good one is loaded after all that"


def test_a_model_that_is_not_the_one_expected(server, tmp_path, params):
    import torch

    model, load = server
    path = publish(tmp_path, 1, params).path
    model.put("model.layers.0.mlp.scale", torch.nn.Parameter(torch.zeros(1)))
    assert "mlp.scale is not one of Qwen3.5's" in load(path)["error"]
    del model.model.layers._modules["0"].mlp._parameters["scale"]
    model.put("visual.patch.weight", torch.nn.Parameter(torch.zeros(1)))  # another tower is none of our business
    assert load(path)["error"] == ""
    del model.model.layers._modules["1"]
    assert "the server's model lacks layers.1" in load(path)["error"]


def test_the_multimodal_way_of_naming_is_understood(server, tmp_path, params):
    """Published as model.language_model.*, served as model.*: the same tensors, and the digest is under the published names."""
    _, load = server
    tensors = {f"model.language_model.{n.removeprefix('model.')}" if n != "lm_head.weight" else n: t for n, t in hf.to_hf_tensors(CONFIG, params)}
    stored = {n: weights._stored(n, t, "bfloat16") for n, t in tensors.items()}
    path = tmp_path / "00000001"
    weights._write(path / manifest.ARRAYS, stored, manifest.ORBAX)
    content = manifest.make(1, manifest.ORBAX, {n: manifest.fingerprint(t) for n, t in stored.items()})
    (path / manifest.FILE).write_text(json.dumps(content))
    assert load(path) == {"digest": content["digest"], "error": ""}


def _run_ranks(size: int, checkpoint, versions: list[str]) -> list[list[dict]]:
    """What each rank of a server of `size` answered after each version."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = pathlib.Path(__file__).with_name("one_rank.py")
    commands = [[sys.executable, str(script), str(rank), str(size), str(port), str(checkpoint), *versions] for rank in range(size)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    answers = [[json.loads(line) for line in rank.communicate(timeout=280)[0].splitlines()] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return answers


def test_two_ranks_hold_one_version_and_each_reads_its_share(tmp_path, monkeypatch):
    """One key-value head for two ranks, and a vocabulary that is padded for them. Wide enough that files hold more weights than index."""
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 4096)
    config = models.config(tie_embeddings=False, hidden_size=128, intermediate_size=512, vocab_size=450)
    params = models.params(config)
    hf.save_hf(tmp_path / "wide", config, params, "bfloat16")
    one, two, three = (
        weights.publish(tmp_path / "weights", v, config, p, dtype="bfloat16") for v, p in ((1, params), (2, nudge(params)), (3, params))
    )
    (pathlib.Path(three.path) / manifest.FILE).unlink()
    first, second = _run_ranks(2, tmp_path / "wide", [one.path, two.path, three.path, one.path])
    assert [a["digest"] for a in first] == [one.digest, two.digest, "", one.digest]
    assert ["never completely published" in a["error"] for a in first] == [False, False, True, False]
    assert [a["digest"] for a in second] == ["", "", "", ""], "only the first rank's answer leaves the server"
    ((alone,),) = _run_ranks(1, tmp_path / "wide", [one.path])
    assert alone["digest"] == one.digest and alone["bytes"] > sum(t.nbytes for _, t in hf.to_hf_tensors(config, params)) / 2
    assert max(first[0]["bytes"], second[0]["bytes"]) < 0.7 * alone["bytes"]
