"""The config chooses the engine; what cannot be is refused before anything is built."""

import pytest
from rollout import models

from configs import coevolve, pocket
from intraskill import parts, weights
from intraskill.rollout.sglang import SGLangEngine
from intraskill.types import InputError, Published


def config(**engine):
    made = pocket.get_config("smoke")
    made.engine.update(engine)
    return made


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kind": "vllm"}, "engine.kind = 'vllm': choose one of embedded, sglang"),
        ({"kind": "sglang"}, "engine.addresses is empty"),
        ({"dtype": "float16"}, "engine.dtype = 'float16': choose one of float32, bfloat16"),
        ({"layout": "torch"}, "engine.layout = 'torch': choose one of orbax, safetensors"),
    ],
)
def test_settings_that_cannot_be(engine, message):
    with pytest.raises(InputError, match=message):
        parts.check_settings(config(**engine))


async def test_servers_are_reached_over_http_and_get_what_they_hold(tmp_path, monkeypatch):
    made = config(kind="sglang", addresses=("http://127.0.0.1:1", "http://127.0.0.1:2"), turn_seconds=3.0)
    engine = parts.make_engine(made, object.__new__(parts.Policy))
    assert isinstance(engine, SGLangEngine)
    assert [r.address for r in engine._replicas] == ["http://127.0.0.1:1", "http://127.0.0.1:2"] and engine._limits.turn_seconds == 3.0
    await engine.close()
    published = {}
    monkeypatch.setattr(weights, "publish", lambda *arguments, **form: published.update(form) or Published(1, "", ""))
    parts.publish(made, tmp_path, 1, models.config(), {})
    assert published == {"dtype": "bfloat16", "layout": "orbax"}
    published.clear()
    parts.publish(config(), tmp_path, 1, models.config(), {})
    assert published == {}, "the embedded engine holds what the trainer holds"


def test_the_pods_config_names_servers():
    assert coevolve.get_config().engine.kind == "sglang" and coevolve.get_config().engine.addresses
