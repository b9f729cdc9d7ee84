"""Weights on their way from the trainer to the engines: arrays under Hugging Face names, and a manifest that identifies them.

A version is a directory `NNNNNNNN/` of arrays and `manifest.json`, which is renamed into place last: without it the version does not exist.
The arrays are Orbax's (OCDBT, uncompressed: the fastest to write and to read back), or safetensors for engines without our loader. The
digest covers every tensor's name, shape, dtype and bytes, because at RL learning rates two versions differ in a few percent of their bf16
bytes and no probe of a model's outputs tells them apart.
"""

import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from safetensors import safe_open
from safetensors.numpy import save_file

from intraskill import manifest
from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig
from intraskill.run_directory import reason, require_disk, write_json
from intraskill.types import InputError, Published

DTYPES = ("float32", "bfloat16")
LAYOUTS = (manifest.ORBAX, manifest.SAFETENSORS)
# Serving engines hold the decay rates in float32 whatever the dtype of the rest.
_ALWAYS_FLOAT32 = "linear_attn.A_log"
_SHARD_BYTES = 4 << 30
# A rank of a tensor-parallel engine reads its share in pieces of this size; smaller ones cost more calls.
_CHUNK_BYTES = 8 << 20


class WeightsError(InputError):
    """Published weights that are missing, incomplete, or not the ones they are said to be."""


# ---------------------------------------------------------------------------------------------------------------- digest


def digest_of(config: ModelConfig, params: Any, dtypes: Mapping[str, str] | None = None) -> str:
    """The digest of live parameters under their published names: what `publish` would write for them.

    Args:
      config: of `params`.
      params: live parameters.
      dtypes: dtypes by published name, where the published tensors are narrower than the parameters. A parameter that its published dtype
        cannot hold exactly keeps its own, so that the digest differs.
    """
    tensors = hf.to_hf_tensors(config, params)
    return manifest.digest_of((name, _narrowed(tensor, (dtypes or {}).get(name))) for name, tensor in tensors)


def _narrowed(tensor: np.ndarray, dtype: str | None) -> np.ndarray:
    if dtype is None or str(tensor.dtype) == dtype:
        return tensor
    narrow = tensor.astype(jnp.dtype(dtype))
    return narrow if np.array_equal(narrow.astype(tensor.dtype), tensor) else tensor


def verify(published: Published, config: ModelConfig, params: Any) -> None:
    """Raises WeightsError unless the live parameters are exactly the published ones."""
    dtypes = {name: e["dtype"] for name, e in _manifest(pathlib.Path(published.path))["tensors"].items()}
    found = digest_of(config, params, dtypes)
    if found != published.digest:
        raise WeightsError(f"the loaded parameters have digest {found}, published was {published.digest}: load again")


# --------------------------------------------------------------------------------------------------------------- publish


def publish(
    directory: str | os.PathLike[str],
    version: int,
    config: ModelConfig,
    params: Any,
    *,
    dtype: str | None = None,
    layout: str = manifest.ORBAX,
) -> Published:
    """Writes `params` as `version`; it exists for readers once this returns, and not at all if it is killed or fails before.

    Publishing the same weights again under the same version is fine (a resumed run does); different ones are refused.

    Args:
      directory: of all versions; on a pod a file system that the engines' hosts see under the same path.
      version: counts up.
      config: of `params`.
      params: the parameters; each is gathered on this host.
      dtype: what the engines hold, "float32" or "bfloat16" (the decay rates stay float32); the parameters' own unless given.
      layout: "orbax", or "safetensors" for `/update_weights_from_disk`.

    Raises:
      InputError: too little space is left on the disk, or writing failed.
    """
    if layout not in LAYOUTS or dtype not in (None, *DTYPES):
        raise InputError(f"weights are published as {' or '.join(LAYOUTS)}, in {' or '.join(DTYPES)}; got {layout!r}, {dtype!r}")
    path = pathlib.Path(directory).absolute() / f"{version:08d}"
    tensors = {name: _stored(name, tensor, dtype) for name, tensor in hf.to_hf_tensors(config, params)}
    content = manifest.make(version, layout, {name: manifest.fingerprint(tensor) for name, tensor in tensors.items()})
    published = Published(version, str(path), content["digest"])
    if (path / manifest.FILE).exists():
        found = _manifest(path)
        if found["digest"] != published.digest:
            raise WeightsError(f"{path} already holds other weights (digest {found['digest'][:12]}, not {published.digest[:12]}): use a new version")
        if found["layout"] == layout:
            return published
    if path.exists():  # what a killed publication left, or the same weights in the other layout
        _remove(path)
    require_disk(path, sum(tensor.nbytes for tensor in tensors.values()))
    try:
        _write(path / manifest.ARRAYS, tensors, layout)
        write_json(path / manifest.FILE, content)
    except BaseException as e:
        for _ in range(5):  # threads of Orbax may still be writing, and make the directory anew
            shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.1)
        if isinstance(e, Exception):  # the libraries raise many types when a write fails
            raise InputError(f"{path} could not be written ({reason(e)}): check the disk's space, then resume") from e
        raise
    return published


def _stored(name: str, tensor: np.ndarray, dtype: str | None) -> np.ndarray:
    if dtype is None:
        return tensor
    return tensor.astype(jnp.dtype("float32" if name.endswith(_ALWAYS_FLOAT32) else dtype), copy=False)


def _write(path: pathlib.Path, tensors: dict[str, np.ndarray], layout: str) -> None:
    path.parent.mkdir(parents=True)
    if layout == manifest.ORBAX:
        with contextlib.closing(_checkpointer()) as checkpointer:
            pieces = dict.fromkeys(tensors, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
            checkpointer.save(path, args=ocp.args.PyTreeSave(tensors, save_args=pieces))
        return
    path.mkdir()
    shards: list[dict[str, np.ndarray]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    for number, shard in enumerate(shards, start=1):
        save_file(shard, path / f"model-{number:05d}-of-{len(shards):05d}.safetensors", metadata={"format": "pt"})


def prune(directory: str | os.PathLike[str], keep: Collection[int]) -> list[int]:
    """Deletes all versions except `keep` (those that an engine serves or may still be asked to), and returns the deleted ones."""
    doomed = [(v, p) for v, p in _versions(pathlib.Path(directory)) if v not in keep]
    for _, path in doomed:
        _remove(path)
    return [v for v, _ in doomed]


def _remove(path: pathlib.Path) -> None:
    (path / manifest.FILE).unlink(missing_ok=True)  # first, so that no reader meets half a version
    shutil.rmtree(path)


def _versions(directory: pathlib.Path) -> Iterator[tuple[int, pathlib.Path]]:
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.isdigit() and path.is_dir():
            yield int(path.name), path


def _checkpointer() -> ocp.Checkpointer:
    """Of this process alone: where a run has several, the others take no part in publishing, and do not wait for each other."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}, barrier_sync_key_prefix=f"weights_{jax.process_index()}"
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


# ------------------------------------------------------------------------------------------------------------------ read


def find(path: str | os.PathLike[str]) -> Published:
    """What lies in a version directory, by its own manifest. Raises WeightsError when that is missing or broken."""
    content = _manifest(pathlib.Path(path))
    return Published(content["version"], str(path), content["digest"])


def read(published: Published, config: ModelConfig) -> Any:
    """The parameters that `publish` wrote, in `config.param_dtype`.

    Raises:
      WeightsError: there is no manifest, or version, digest, names, shapes, dtypes or bytes are not those asked for; or the parameters'
        dtype cannot hold the published one exactly.
    """
    path = pathlib.Path(published.path)
    content = _manifest(path)
    for key in ("version", "digest"):
        if content[key] != getattr(published, key):
            raise WeightsError(f"{path} holds {key} {content[key]}, asked for was {getattr(published, key)}: publish again")
    entries = content["tensors"]
    try:
        hf.check_tensors(config, {name: tuple(e["shape"]) for name, e in entries.items()}, str(path))
    except InputError as e:
        raise WeightsError(str(e)) from e
    too_wide = sorted({e["dtype"] for e in entries.values()} - {config.param_dtype, "bfloat16"})
    if too_wide:
        raise WeightsError(f"{path} holds {', '.join(too_wide)}, the model's parameters are {config.param_dtype}: publish with the same param_dtype")
    tensors = _read_arrays(path, list(entries), content["layout"])
    wrong = [name for name, entry in entries.items() if name not in tensors or manifest.fingerprint(tensors[name]) != entry]
    if wrong:
        raise WeightsError(f"{path}: {len(wrong)} tensors are not what the manifest says, the first is {wrong[0]}: publish again")
    return hf.from_hf_tensors(config, tensors, str(path))


def _manifest(path: pathlib.Path) -> dict[str, Any]:
    try:
        return manifest.read(path)
    except manifest.ManifestError as e:
        raise WeightsError(str(e)) from None


def _read_arrays(path: pathlib.Path, names: list[str], layout: str) -> dict[str, np.ndarray]:
    try:
        if layout == manifest.SAFETENSORS:
            return _read_safetensors(path / manifest.ARRAYS)
        wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        with contextlib.closing(_checkpointer()) as checkpointer:
            return checkpointer.restore(path / manifest.ARRAYS, args=ocp.args.PyTreeRestore(restore_args=wanted))
    except Exception as e:  # Orbax, tensorstore and safetensors raise many types for files that are damaged or gone
        raise WeightsError(f"{path} cannot be read although its manifest is there ({type(e).__name__}: {str(e)[:300]}): publish again") from e


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="np") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}
    return tensors
