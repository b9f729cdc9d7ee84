import base64
import io
import pickle
import pickletools

import pytest

from intraskill.rollout import wire
from intraskill.types import InputError, Session


class _Tensor:
    """What the opcodes name as torch.ByteTensor, for a test without torch."""

    def __init__(self, values):
        self.values = values


class _Reader(pickle.Unpickler):
    def find_class(self, module, name):
        assert (module, name) == ("torch", "ByteTensor")
        return _Tensor


@pytest.mark.parametrize("kind", wire.KINDS)
@pytest.mark.parametrize("path", ["/runs/a/weights/00000003", "/späne/Ω", "/" + "x" * 3000, "/with\nnewline(e\x85R."])
def test_a_payload_is_a_pickle_of_one_named_byte_tensor_and_comes_back(kind, path):
    text = wire.write_payload(kind, path)
    ((name, tensor),) = _Reader(io.BytesIO(base64.b64decode(text))).load()
    assert name == kind and bytes(tensor.values).decode() == path
    assert wire.read_payload(text) == (kind, path)


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class _Evil:
    def __reduce__(self):
        return (print, ("never",))


GOOD = base64.b64decode(wire.write_payload(wire.LOAD, "/a"))
OTHERS = {
    "a call": _encoded(pickle.dumps([("orbax_path", _Evil())])),
    "plain data": _encoded(pickle.dumps([("orbax_path", b"/a")])),
    "another protocol": _encoded(pickle.dumps([("orbax_path", [47, 97])], protocol=2)),
    "another global": _encoded(GOOD.replace(b"torch\nByteTensor", b"posix\nsystem....")),
    "another kind": _encoded(GOOD.replace(b"\x0aorbax_path", b"\x04evil")),
    "a kind of another length": _encoded(GOOD.replace(b"\x0aorbax", b"\x09orbax")),
    "more behind": _encoded(GOOD + b"cposix\nsystem\n."),
    "a call hidden in the numbers": _encoded(GOOD.replace(b"K/Ka", b"K/cposix\nsystem\nKa")),
    "no path": _encoded(GOOD.replace(b"K/Ka", b"")),
    "no text in the path": _encoded(GOOD.replace(b"K/Ka", b"K\xffK\xfe")),
    "cut short": _encoded(GOOD[:-1]),
    "nothing": "",
    "no base64": "*" * 8,
    "no string": 7,
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_pickle_is_refused_unread(name, capsys):
    with pytest.raises(InputError, match="only published versions can be loaded"):
        wire.read_payload(OTHERS[name])
    assert "never" not in capsys.readouterr().out


def test_every_single_byte_changed_is_refused_or_a_path():
    """Only the path's own bytes may differ."""
    allowed = {position + 1 for opcode, _, position in pickletools.genops(GOOD) if opcode.code == "K"}
    for i in range(len(GOOD)):
        for flip in (1, 0x20, 0x80):
            data = bytearray(GOOD)
            data[i] ^= flip
            try:
                kind, path = wire.read_payload(_encoded(bytes(data)))
            except InputError:
                continue
            assert i in allowed and kind == wire.LOAD and len(path) == 2


def test_request_ids_name_their_session_and_seeds_depend_on_the_noise_alone():
    session = Session("0-1-7-3-1", (0, 1, 7, 3))
    assert wire.session_of(wire.request_id(session, "12")) == session.id and wire.session_of("health") == ""
    seeds = {wire.sampling_seed(Session("x", (0, 1, group, e))) for group in range(20) for e in range(20)}
    assert len(seeds) == 400 and all(0 <= s < 2**63 for s in seeds)
    assert wire.sampling_seed(session) == wire.sampling_seed(Session("another id", session.noise))
