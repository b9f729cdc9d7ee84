"""config.json with values that nobody should write: a model, or one line that says what is wrong."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import checkpoints, tiny

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig
from intraskill.types import InputError

TEXT = tiny.config("three_to_one").to_hf()
ODD = [None, True, False, 0, -1, 7, 2.5, 1e400, float("nan"), "", "8", "x", [], [1], ["linear_attention"], {}, {"rope_type": 3}, {"rope_theta": "x"}]


def write(directory, content):
    (directory / "config.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("config")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(TEXT)), st.sampled_from(ODD), min_size=1, max_size=2), nested=st.booleans())
def test_odd_values_never_raise_anything_else(directory, changes, nested):
    text = {**TEXT, **changes}
    write(directory, {"model_type": "qwen3_5", "text_config": text} if nested else text)
    try:
        assert isinstance(hf.load_config(directory), ModelConfig)
    except InputError as error:
        assert str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"layer_types": 3}, "layer_types"),
        ({"num_attention_heads": 3}, "num_heads is 3"),
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": math.inf}, "rms_eps is inf"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"rope_parameters": {"type": "yarn", "rope_theta": 1e4}}, "type of rope_parameters is 'yarn'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "type of rope_scaling is 'yarn'"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"num_hidden_layers": 2 * 10**9}, "layer_types names 4 layers and num_hidden_layers is 2000000000"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_wrong_values_are_named(tmp_path, changes, message):
    write(tmp_path, {**TEXT, **changes})
    with pytest.raises(InputError, match=message) as caught:
        hf.load_config(tmp_path)
    assert "config.json" in str(caught.value) or "model " in str(caught.value)


def test_json_nested_too_deep_is_no_traceback(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="not readable as JSON"):
        hf.load_config(tmp_path)


def test_a_slip_in_the_number_of_layers_does_not_fill_the_memory(tmp_path):
    """All names of two thousand million layers would."""
    config = tiny.config()
    checkpoints.multimodal(tmp_path / "published", config)
    content = json.loads((tmp_path / "published" / "config.json").read_text())
    del content["text_config"]["layer_types"]
    content["text_config"] |= {"num_hidden_layers": 2 * 10**9, "full_attention_interval": 2}
    write(tmp_path / "published", content)
    with pytest.raises(InputError, match="config.json asks for 2000000000 layers"):
        hf.load_hf(tmp_path / "published")
