"""A JSON array or object of any size, one element at a time.

The usual streaming parsers stop for good at the first fault, and at NaN, which these data sets contain. Here a scanner only finds where each
element ends, the standard parser reads it, and an element that it cannot read is one bad row: the next one is read as if nothing happened.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shop_env.errors import InvalidSource

MAX_ELEMENT = 1 << 24  # characters; a longer element means that a quote or bracket is missing in it
MAX_DEPTH = 64  # of brackets within brackets; Python's own parser gives up at several hundred, and what walks the values sooner
_CHUNK = 1 << 20
# A string runs to its closing quote or, where that is missing, to the end of its line (JSON strings hold no line breaks), so that one
# lost quote does not swallow the rest of the file.
_TOKEN = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*(?P<end>["\n])?|[\[\]{},]', re.DOTALL)
_RESUME = re.compile(r"\n|\}\s*,\s*(?=\{)")  # where reading goes on after an element that does not end


class Unreadable:
    """A piece of the file that is no JSON: how it begins, and what is wrong with it."""

    def __init__(self, text: str, problem: str):
        self.text = text[:80]
        self.problem = problem


def first_character(path: Path) -> str:
    """The first character that is not white space: "[" of an array, "{" of an object, "" of an empty file."""
    return next((text[0] for chunk in _chunks(path) if (text := chunk.strip())), "")


def array_elements(path: Path) -> Iterator[Any]:
    """The elements of a top-level array in order; those that are no JSON as `Unreadable`."""
    for piece in _pieces(path, "[]"):
        yield piece if isinstance(piece, Unreadable) else _parsed(piece, piece)


def object_items(path: Path) -> Iterator[tuple[str, Any]]:
    """The (key, value) pairs of a top-level object in order; the value of those that are no JSON is `Unreadable`."""
    for piece in _pieces(path, "{}"):
        pair = piece if isinstance(piece, Unreadable) else _parsed("{" + piece + "}", piece)
        yield from [("", pair)] if isinstance(pair, Unreadable) else pair.items()


def _parsed(text: str, shown: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as e:
        return Unreadable(shown.strip(), str(e))


def _pieces(path: Path, brackets: str) -> Iterator[str | Unreadable]:
    """The text between the commas of the top level, blank pieces left out.

    An element that never ends (a lost quote or bracket) is given up at its first line, and reading goes on behind that line. A stray closing
    bracket stays in its piece, which is then no JSON.
    """
    chunks = filter(None, _chunks(path))  # "" means the end below
    buffer, start, at, depth = "", 0, 0, 0  # the current piece begins at `start`, its text is scanned up to `at`
    deepest = 0
    while True:
        chunk = next(chunks, "")
        buffer, at, start = buffer[start:] + chunk, at - start, 0
        for token in _TOKEN.finditer(buffer, at):
            kind = token[0][0]
            if kind == '"' and token["end"] is None:
                break  # the string goes on in the next chunk
            at = token.end()
            if depth == 0:
                if kind != brackets[0] or buffer[: token.start()].strip():
                    raise InvalidSource(f"{path}: expected {brackets[0]!r} first, got {buffer.strip()[:40]!r}; is this file of the format named?")
                depth, start = 1, at
            elif kind in "[{":
                depth += 1
                deepest = max(deepest, depth)
            elif kind in "]}" and depth > 1:
                depth -= 1
            elif depth == 1 and kind in ("," + brackets[1]):
                if piece := buffer[start : token.start()].strip():
                    yield piece if deepest <= MAX_DEPTH else Unreadable(piece, f"nested more than {MAX_DEPTH} deep")
                start, deepest = at, 0
                if kind == brackets[1]:
                    if rest := next((text for more in (buffer[at:], *chunks) if (text := more.strip())), ""):
                        yield Unreadable(rest, f"text after the closing {brackets[1]!r}")
                    return
        if depth == 0 and not chunk:
            raise InvalidSource(f"{path}: no {brackets[0]!r} in it; is this file of the format named?")
        if not chunk or len(buffer) - start > MAX_ELEMENT:
            if not buffer[start:].strip():
                yield Unreadable("", f"the file ends without its closing {brackets[1]!r}; it was cut short")
                return
            resume = _RESUME.search(buffer, start + 1)
            end = resume.end() if resume else len(buffer)
            yield Unreadable(buffer[start:end].strip(), "a quote or bracket is missing")
            start, at, depth, deepest = end, end, 1, 0


def _chunks(path: Path) -> Iterator[str]:
    """The text in pieces, plain or compressed by gzip whatever the name; what is no UTF-8 becomes U+FFFD.

    Compressed data that breaks off counts as the end of the file: what is missing shows as a missing closing bracket.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    try:
        with open(path, "rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
            while data := _read(file):
                yield decoder.decode(data)
    except (OSError, zlib.error) as e:  # damage inside compressed data, or a wrong checksum, is an OSError or a zlib.error
        raise InvalidSource(f"{path}: unreadable ({e}); give files of JSON text, plain or compressed by gzip") from None
    yield decoder.decode(b"", final=True)


def _read(file: Any) -> bytes:
    try:
        return file.read1(_CHUNK)
    except EOFError:
        return b""
