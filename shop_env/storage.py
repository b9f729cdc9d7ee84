"""Directories of canonical files with a manifest: written atomically, verified when read.

The manifest lists every file's sha256, so that a truncated or edited file is refused instead of changing results silently.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shop_env.errors import InvalidWorld

MANIFEST = "manifest.json"


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, no escapes, no NaN."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_lines(rows: Iterable[Any]) -> bytes:
    """Rows as JSON lines. Key order is kept: the order of options is part of a product."""
    return "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n" for row in rows).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_directory(directory: str | Path, kind: str, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
    """Writes `files` and, last, the manifest that vouches for them. Raises InvalidWorld when the directory cannot be written."""
    directory = Path(directory)
    manifest = {"kind": kind, "schema": 1, **facts, "sha256": {name: digest(data) for name, data in files.items()}}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in [*files.items(), (MANIFEST, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())]:
            temporary = directory / f".{name}.tmp"
            with open(temporary, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, directory / name)
    except OSError as e:
        raise InvalidWorld(f"{directory}: cannot be written ({e.strerror or e}); check the path, its rights and the disk's space") from None


def read_directory(directory: str | Path, kind: str, names: Iterable[str]) -> dict[str, bytes]:
    """Reads the named files of a directory of this kind, each checked against the manifest."""
    directory = Path(directory)
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        hashes = dict(manifest["sha256"])
    except FileNotFoundError:
        raise InvalidWorld(f"{directory}: no {MANIFEST}; give a directory that was written by save()") from None
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise InvalidWorld(f"{directory / MANIFEST}: unreadable ({e!r}); write the directory again") from None
    if manifest.get("kind") != kind or manifest.get("schema") != 1:
        raise InvalidWorld(f"{directory}: holds {manifest.get('kind')!r} schema {manifest.get('schema')!r}, expected {kind!r} schema 1")
    files = {}
    for name in names:
        try:
            files[name] = (directory / name).read_bytes()
        except OSError as e:
            raise InvalidWorld(f"{directory / name}: unreadable ({e.strerror}); write the directory again") from None
        if digest(files[name]) != hashes.get(name):
            raise InvalidWorld(f"{directory / name}: sha256 differs from the manifest; the file was changed or cut short, write the directory again")
    return files


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def read_rows(data: bytes, where: str) -> list[dict[str, Any]]:
    """JSON lines back to dicts."""
    rows = []
    lines = data.removesuffix(b"\n").split(b"\n") if data else []  # str.splitlines() would also split inside texts, at U+2028
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode(), parse_constant=_no_number)
        except (ValueError, RecursionError) as e:
            raise InvalidWorld(f"{where} line {number}: not JSON ({e})") from None
        if not isinstance(row, dict):
            raise InvalidWorld(f"{where} line {number}: a JSON object expected, got {type(row).__name__}")
        rows.append(row)
    return rows
