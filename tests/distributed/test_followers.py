"""What travels between processes, and what is refused before a job begins."""

import dataclasses
import socket
import types

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import coevolve, pocket
from intraskill import followers, parts
from intraskill.checkpoint import checksums
from intraskill.followers import Command, Lead
from intraskill.models.qwen35.config import ModelConfig
from intraskill.process_start import Place
from intraskill.run_directory import plain
from intraskill.types import Batch, InputError, Sampling


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    mask = rng.random((2, 3)) < 0.7
    ints = {name: rng.integers(0, 9, (2, 5), dtype=np.int32) for name in ("tokens", "positions", "segment_ids")}
    trained = {name: rng.integers(0, 5, (2, 3), dtype=np.int32) for name in ("index", "targets", "episode")}
    reals = {name: np.where(mask, rng.normal(size=(2, 3)), 0).astype(np.float32) for name in ("weight", "advantage")}
    logprobs = {name: rng.normal(size=(2, 3)).astype(np.float32) for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs")}
    return Batch(**ints, **trained, **reals, **logprobs, mask=mask)


def test_a_call_and_its_batches_arrive_as_they_were():
    sent = [batch(0), batch(1)]
    command, values, got = followers._decode(followers._encode(Command.SAVE, {"step": 3, "position": {"round_starts": [0, 4], "ü": None}}, sent))
    assert (command, values) == (Command.SAVE, {"step": 3, "position": {"round_starts": [0, 4], "ü": None}})
    assert len(got) == 2
    for one, other in zip(sent, got, strict=True):
        for field in dataclasses.fields(Batch):
            expected, found = getattr(one, field.name), getattr(other, field.name)
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == expected.dtype and found.shape == expected.shape
    assert followers._decode(followers._encode(Command.STOP, {"why": ""}, ())) == (Command.STOP, {"why": ""}, [])


def test_nothing_that_needs_a_pickle_is_sent_or_read():
    import io

    buffer = io.BytesIO()
    np.savez(buffer, **{f"0.{f.name}": np.array([object()], dtype=object) for f in dataclasses.fields(Batch)})
    header = b'{"command": "update", "values": {}, "batches": 1}'
    with pytest.raises(ValueError, match="allow_pickle=False"):
        followers._decode(len(header).to_bytes(4, "big") + header + buffer.getvalue())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("h:1", None, None), "go together"),
        ((None, 2, 0), "go together"),
        (("h:1", 2, 2), "must be 0 to 1"),
        *(((address, 2, 0), "HOST:PORT") for address in ("host", "host:", ":1", "h:0", "h:65536", "h:-1", "h:1e3", "h:\u00b2", "h:" + "9" * 5000)),
    ],
)
def test_a_place_that_is_none_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        Place(*given)


def test_a_process_that_is_told_of_no_others_is_alone():
    for place in (Place(), Place("127.0.0.1:1", 1, 0)):
        lead = followers.join(place, pocket.get_config().distributed)
        assert isinstance(lead, Lead) and lead.num_processes == 1
        lead.tell(Command.UPDATE, batches=[batch(0)])
        params = {"a": np.ones(3)}
        assert lead.whole(params) is params


@pytest.mark.parametrize(("error", "words"), [(KeyboardInterrupt(), "interrupted"), (InputError("no disk"), "no disk")])
def test_the_others_are_told_why_process_0_ends(error, words):
    told, lead = [], Lead()
    lead._lines[1] = types.SimpleNamespace(end=told.append)
    with pytest.raises(type(error)), lead:
        raise error
    assert [followers._decode(message)[1] for message in told] == [{"why": f"process 0 has ended the run: {words}", "now": False}]


def test_the_embedded_engine_is_refused_over_several_processes():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as caller:
        connection, _ = server.accept()
        lead = Lead({1: (connection, "there")}, heartbeat_seconds=600.0)
        with lead, pytest.raises(InputError, match="engine.kind = embedded with 2 processes"):
            parts.check_processes(pocket.get_config("smoke"), lead)
        parts.check_processes(coevolve.get_config(), lead)
        caller.recv(1)
        connection.close()


def test_a_mesh_over_several_processes_takes_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = pocket.get_config()
    shape = ModelConfig(64, 16, 16, 2, 2, 1, 1, 16, 1, 1, 16, 16)
    with pytest.raises(InputError, match="mesh data x fsdp x tensor = 1, but the 2 processes have 8 devices"):
        parts.make_learner(config, shape, Sampling(1))


class _Told(followers.Follower):
    """A follower's end of a line on which one message has come."""

    def __init__(self, config, params, **changes):
        values = {"run": "nowhere", "banned_ids": [], "config": plain(config.to_dict()), "parameters": checksums(params), **changes}
        self._message = followers._decode(followers._encode(Command.PREPARE, values, ()))

    def receive(self):
        return self._message


PARAMS = {"embed": np.arange(6, dtype=np.float32).reshape(2, 3), "norm": np.ones(3, np.float32)}


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, 0.5)
    return value + type(value)(1) if isinstance(value, int | float) else value + "x"


def leaves(config, prefix=""):
    for name, value in config.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else [(prefix + name, value)]


def test_a_process_with_other_settings_or_weights_than_process_0_refuses_to_train(monkeypatch):
    """Each would compile another program, or train another policy, and no collective would notice."""
    made = []
    monkeypatch.setattr(parts, "_load_params", lambda _: (None, PARAMS))
    monkeypatch.setattr(parts, "make_checkpointer", lambda *_: made.append("checkpointer"))
    monkeypatch.setattr(parts, "make_learner", lambda *_: None)
    monkeypatch.setattr(followers, "follow", lambda *_: made.append("follows"))
    parts.follow(coevolve.get_config(), _Told(coevolve.get_config(), PARAMS))
    assert made == ["checkpointer", "follows"]
    for key, value in leaves(coevolve.get_config()):
        other = coevolve.get_config()
        other.update_from_flattened_dict({key: changed(value)})
        with pytest.raises(InputError, match=rf"^{key} = .* here and .* at process 0: start all processes with the same"):
            parts.follow(other, _Told(coevolve.get_config(), PARAMS))
    for name in PARAMS:
        other = {**PARAMS, name: np.nextafter(PARAMS[name], 9)}
        with pytest.raises(InputError, match=f"holds other weights here than at process 0.*{name}"):
            parts.follow(coevolve.get_config(), _Told(coevolve.get_config(), other))
    assert made == ["checkpointer", "follows"]
