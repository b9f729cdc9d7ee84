"""What the client and our own server have to agree on beyond SGLang's routes: request ids, noise, and the pickled path.

SGLang takes tensors as pickles. The only one that ever travels here is `[(kind, torch.ByteTensor([bytes of a path]))]`. It is written
without torch, opcode by opcode, and read by comparing it with what would have been written: no unpickler runs, so nothing but this can come in.
"""

import base64
import binascii
import hashlib
import re
from typing import Any

from intraskill.types import InputError, Session

LOADER = "intraskill.rollout.sglang_loader.load"
LOAD, ATTACH = KINDS = "orbax_path", "attach"  # load the version directory; only compare with it
QUESTION = "intraskill.digest"  # the name that /get_weights_by_name is asked for
BANNED = -1e9  # logit bias of an id that may not be sampled; JSON has no infinity

_PICKLE = re.compile(rb"\x80\x04\]\x8c.([a-z_]+)ctorch\nByteTensor\n\]\(((?:K.)*)e\x85R\x86a\.", re.DOTALL)


def _pickle(kind: str, path: str) -> bytes:
    """Protocol 4: a list of one pair, of a string and a call of `torch.ByteTensor` with a list of small integers."""
    numbers = b"".join(b"K" + bytes([byte]) for byte in path.encode())
    return b"\x80\x04]\x8c" + bytes([len(kind)]) + kind.encode() + b"ctorch\nByteTensor\n](" + numbers + b"e\x85R\x86a."


def write_payload(kind: str, path: str) -> str:
    """An item of `serialized_named_tensors`."""
    assert kind in KINDS and path
    return base64.b64encode(_pickle(kind, path)).decode()


def read_payload(text: Any) -> tuple[str, str]:
    """Kind and path of such an item. Raises InputError for anything else, without interpreting it."""
    refusal = InputError(f"the tensor payload is not [(kind, uint8 path)] with kind {' or '.join(KINDS)}: only published versions can be loaded")
    try:
        data = base64.b64decode(text, validate=True)
        match = _PICKLE.fullmatch(data)
        if match is None:
            raise refusal
        kind, path = match[1].decode(), match[2][1::2].decode()
    except (TypeError, ValueError, binascii.Error):
        raise refusal from None
    if kind not in KINDS or not path or _pickle(kind, path) != data:
        raise refusal
    return kind, path


def request_id(session: Session, number: str) -> str:
    """SGLang takes any unique text; ours also says to which session the turn belongs. The prefix up to the slash stands for the session."""
    return f"{session.id}/{number}"


def session_of(request: str) -> str:
    return request.rpartition("/")[0]


def sampling_seed(session: Session) -> int:
    """63 bits that depend on the session's noise alone."""
    return int.from_bytes(hashlib.sha256(repr(session.noise).encode()).digest()[:8], "little") >> 1
