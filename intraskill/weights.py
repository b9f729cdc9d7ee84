"""Weights on their way from the trainer to the engines: an Orbax checkpoint under Hugging Face names, and a manifest that identifies it.

A version is a directory `NNNNNNNN/` of Orbax arrays (OCDBT, uncompressed: the fastest to write and to read back) and `manifest.json`, which
is renamed into place last: without it the version does not exist. The digest covers every tensor's name, shape, dtype and bytes, because at
RL learning rates two versions differ in a few percent of their bf16 bytes and no probe of a model's outputs tells them apart.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig
from intraskill.run_directory import write_json
from intraskill.types import InputError, Published

SCHEMA = 1
MANIFEST = "manifest.json"
_ARRAYS = "arrays"


class WeightsError(InputError):
    """Published weights that are missing, incomplete, or not the ones they are said to be."""


# ---------------------------------------------------------------------------------------------------------------- digest


def fingerprint(tensor: np.ndarray) -> dict[str, Any]:
    """A tensor's entry in the manifest: shape, dtype and the sha256 of its bytes in row-major order."""
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "sha256": hashlib.sha256(data.data).hexdigest()}


def digest(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    """Identifies a set of named tensors, in whatever order they come; one changed bit changes it."""
    return _total({name: fingerprint(tensor) for name, tensor in tensors})


def digest_of(config: ModelConfig, params: Any) -> str:
    """The digest of live parameters under their published names: what `publish` would write for them."""
    return digest(hf.to_hf_tensors(config, params))


def _total(entries: Mapping[str, Mapping[str, Any]]) -> str:
    lines = (f"{name} {e['dtype']} {list(e['shape'])} {e['sha256']}\n" for name, e in sorted(entries.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# --------------------------------------------------------------------------------------------------------------- publish


def publish(directory: str | os.PathLike[str], version: int, config: ModelConfig, params: Any) -> Published:
    """Writes `params` as `version`; it exists for readers once this returns, and not at all if it is killed before.

    Publishing the same weights again under the same version is fine (a resumed run does); different ones are refused.
    """
    path = pathlib.Path(directory).absolute() / f"{version:08d}"
    tensors = dict(hf.to_hf_tensors(config, params))
    entries = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    published = Published(version, str(path), _total(entries))
    if (path / MANIFEST).exists():
        found = _read_manifest(path)["digest"]
        if found != published.digest:
            raise WeightsError(f"{path} already holds other weights (digest {found[:12]}, not {published.digest[:12]}): publish under a new version")
        return published
    if path.exists():  # what a killed publication left
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(_checkpointer()) as checkpointer:
        checkpointer.save(path / _ARRAYS, args=ocp.args.PyTreeSave(tensors))
    manifest = {"schema": SCHEMA, "version": version, "digest": published.digest, "tensors": entries}
    write_json(path / MANIFEST, manifest)
    return published


def prune(directory: str | os.PathLike[str], keep: Collection[int]) -> list[int]:
    """Deletes all versions except `keep` (those that an engine serves or may still be asked to), and returns the deleted ones."""
    doomed = [(v, p) for v, p in _versions(pathlib.Path(directory)) if v not in keep]
    for _, path in doomed:
        (path / MANIFEST).unlink(missing_ok=True)  # first, so that no reader meets half a version
        shutil.rmtree(path)
    return [v for v, _ in doomed]


def _versions(directory: pathlib.Path) -> Iterator[tuple[int, pathlib.Path]]:
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.isdigit() and path.is_dir():
            yield int(path.name), path


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False))


# ------------------------------------------------------------------------------------------------------------------ read


def read(published: Published, config: ModelConfig) -> Any:
    """The parameters that `publish` wrote.

    Raises:
      WeightsError: there is no manifest, or version, digest, names, shapes, dtypes or bytes are not those asked for.
    """
    path = pathlib.Path(published.path)
    manifest = _read_manifest(path)
    for key in ("version", "digest"):
        if manifest[key] != getattr(published, key):
            raise WeightsError(f"{path} holds {key} {manifest[key]}, asked for was {getattr(published, key)}: publish again")
    entries = manifest["tensors"]
    try:
        hf.check_tensors(config, {name: tuple(e["shape"]) for name, e in entries.items()}, str(path))
    except InputError as e:
        raise WeightsError(str(e)) from e
    other = sorted({e["dtype"] for e in entries.values()} - {config.param_dtype})
    if other:
        raise WeightsError(f"{path} holds {', '.join(other)}, the model's parameters are {config.param_dtype}: publish with the same param_dtype")
    tensors = _read_arrays(path, list(entries))
    wrong = [name for name, tensor in tensors.items() if fingerprint(tensor) != entries[name]]
    if wrong:
        raise WeightsError(f"{path}: {len(wrong)} tensors are not what the manifest says, the first is {wrong[0]}: publish again")
    return hf.from_hf_tensors(config, tensors, str(path))


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise WeightsError(f"{path} has no {MANIFEST}, so it was never completely published: publish again") from None
    except ValueError as e:
        raise WeightsError(f"{path / MANIFEST} is not valid JSON ({e}): publish again") from None
    if manifest.get("schema") != SCHEMA or _total(manifest["tensors"]) != manifest["digest"]:
        raise WeightsError(f"{path / MANIFEST} contradicts its own digest or has another schema than {SCHEMA}: publish again")
    return manifest


def _read_arrays(path: pathlib.Path, names: list[str]) -> dict[str, np.ndarray]:
    wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    try:
        with contextlib.closing(_checkpointer()) as checkpointer:
            return checkpointer.restore(path / _ARRAYS, args=ocp.args.PyTreeRestore(restore_args=wanted))
    except Exception as e:  # Orbax and tensorstore raise many types for files that are damaged or gone
        raise WeightsError(f"{path} cannot be read although its manifest is there ({type(e).__name__}: {str(e)[:300]}): publish again") from e
