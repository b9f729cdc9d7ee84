"""What travels between processes, and what is refused before a job begins."""

import dataclasses
import socket

import jax
import numpy as np
import pytest

from configs import coevolve, pocket
from intraskill import followers, parts
from intraskill.followers import Command, Lead, Place
from intraskill.models.qwen35.config import ModelConfig
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
        (("host", 2, 0), "HOST:PORT"),
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
