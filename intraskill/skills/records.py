"""Files that know their own hash: how banks, candidates, curricula and gate results lie on disk.

A record is a JSON object `{schema, schema_version, sha256, inputs, content}`. The hash covers everything but itself, over a canonical
form of the parsed values, so spacing and key order are free and any edited value is noticed. A run's files feed one another: `inputs` names the
sha256 of each record that this one was computed from, and a chain of files can be verified without running anything.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from intraskill.run_directory import read_json, write_json
from intraskill.types import InputError

VERSIONS = {"bank": 1, "candidates": 1, "curriculum": 1, "assignments": 1, "gate": 1}  # schema -> the version that this code reads and writes
REHASH = "python -m intraskill.skills rehash"


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value that hashes are taken over; refuses NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def digest(value: Any) -> str:
    """sha256 of a JSON value's canonical form."""
    return hashlib.sha256(canonical(value)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Record:
    """A schema name, its content, and the sha256 of every record it was computed from."""

    schema: str
    content: Mapping[str, Any]
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return digest({"schema": self.schema, "schema_version": VERSIONS[self.schema], "inputs": dict(self.inputs), "content": self.content})

    def sealed(self) -> dict[str, Any]:
        """The object that is written to disk."""
        return {
            "schema": self.schema,
            "schema_version": VERSIONS[self.schema],
            "sha256": self.sha256,
            "inputs": dict(self.inputs),
            "content": self.content,
        }


def write(path: str | os.PathLike, record: Record) -> str:
    """Writes the record atomically and returns its sha256."""
    sealed = record.sealed()
    write_json(path, sealed)
    return sealed["sha256"]


def read_unverified(path: str | os.PathLike, schema: str | None = None) -> tuple[Record, str]:
    """The record in a file and the sha256 that the file claims ("" when it claims none)."""
    raw = read_json(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("content"), dict) or raw.get("schema") not in VERSIONS:
        raise InputError(f"{path}: is not a skills file; expected an object with schema (one of {', '.join(VERSIONS)}) and content")
    name = raw["schema"]
    if schema is not None and name != schema:
        raise InputError(f"{path}: holds schema {name!r}, expected {schema!r}; give the right file")
    if raw.get("schema_version") != VERSIONS[name]:
        raise InputError(f"{path}: {name} schema_version {raw.get('schema_version')!r}, this code reads {VERSIONS[name]}; use the code that wrote it")
    unknown = sorted(set(raw) - {"schema", "schema_version", "sha256", "inputs", "content"})
    inputs = raw.get("inputs", {})
    if unknown or not isinstance(inputs, dict) or not all(isinstance(v, str) for v in inputs.values()):
        raise InputError(f"{path}: unknown keys {unknown} or inputs that are not an object of hashes; remove or repair them, then {REHASH} {path}")
    return Record(name, raw["content"], inputs), str(raw.get("sha256", ""))


def read(path: str | os.PathLike, schema: str | None = None) -> Record:
    """The record in a file, refused with InputError when its content differs from the hash that it carries."""
    record, claimed = read_unverified(path, schema)
    if record.sha256 != claimed:
        raise InputError(
            f"{path}: was edited: its content hashes to {record.sha256[:12]}, its sha256 field begins {claimed[:12] or '(empty)'}; "
            f"if the edit is intended run: {REHASH} {path}"
        )
    return record


def fields(path: str | os.PathLike, value: Any, kind: type, **defaults: Any) -> dict[str, Any]:
    """The keyword arguments of dataclass `kind` out of a JSON object, with unknown and missing names refused."""
    names = [f.name for f in dataclasses.fields(kind)]
    needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected an object for {kind.__name__}, got {type(value).__name__}; write one with {', '.join(names)}")
    unknown, missing = sorted(set(value) - set(names)), sorted(needed - set(value) - set(defaults))
    if unknown or missing:
        raise InputError(f"{path}: {kind.__name__} has unknown fields {unknown} and lacks {missing}; its fields are {', '.join(names)}")
    return {**defaults, **value}
