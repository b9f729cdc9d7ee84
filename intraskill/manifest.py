"""What identifies published weights: a manifest of names, shapes, dtypes and checksums, and one digest over all.

Imports numpy and nothing else of size: the trainer writes manifests and SGLang's process checks them (`rollout.sglang_loader`), in
environments that share no other package of this project.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

SCHEMA = 2
FILE = "manifest.json"
ARRAYS = "arrays"
ORBAX, SAFETENSORS = "orbax", "safetensors"

Entry = Mapping[str, Any]


class ManifestError(ValueError):
    """A manifest that is missing, unreadable, or contradicts itself."""


def fingerprint(tensor: np.ndarray) -> dict[str, Any]:
    """A tensor's entry in the manifest: shape, dtype and the sha256 of its bytes in row-major order."""
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "sha256": hashlib.sha256(data.data).hexdigest()}


def digest(entries: Mapping[str, Entry]) -> str:
    """Identifies a set of named tensors, in whatever order they come; one changed bit, name or shape changes it."""
    lines = (f"{name} {e['dtype']} {list(e['shape'])} {e['sha256']}\n" for name, e in sorted(entries.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest_of(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    return digest({name: fingerprint(tensor) for name, tensor in tensors})


def make(version: int, layout: str, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """The content of the manifest that ends a publication."""
    return {"schema": SCHEMA, "version": version, "layout": layout, "digest": digest(entries), "tensors": dict(entries)}


def read(path: pathlib.Path) -> dict[str, Any]:
    """The manifest of the version directory `path`. Raises ManifestError."""
    try:
        manifest = json.loads((path / FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"{path} has no {FILE}, so it was never completely published: publish again") from None
    except (OSError, ValueError) as e:
        raise ManifestError(f"{path / FILE} is not valid JSON ({e}): publish again") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA or digest(manifest["tensors"]) != manifest["digest"]:
        raise ManifestError(f"{path / FILE} contradicts its own digest or has another schema than {SCHEMA}: publish again")
    return manifest
