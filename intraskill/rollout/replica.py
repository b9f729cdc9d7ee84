"""One server behind SGLang's HTTP contract: single attempts, typed failures, and the weight update as one verified operation.

An update pauses (running turns are retracted: they keep their tokens and give up their caches), loads, compares a digest of the live
parameters with the manifest's, and only then gives the new version its name and continues. Success codes prove nothing here: SGLang answers
success for names it ignored and shapes it cut.
"""

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from intraskill import manifest
from intraskill.rollout import wire
from intraskill.types import Completion, EngineError, InputError, Published, Sampling, Session

OLDEST = (0, 5, 21)  # sessions of weight updates, and the versions of each span of tokens
_QUICK_SECONDS = 10.0  # for what no device takes part in
_ABORT_SECONDS = 5.0  # less than the agent gives an episode's clean-up
_RETRIED = (408, 429)


class Transient(Exception):
    """A failure that another attempt may not meet: connection, time limit, 408, 429, 5xx, an answer that cannot be read."""

    def __init__(self, message: str, *, busy: bool = False, timed_out: bool = False):
        super().__init__(message)
        self.busy = busy  # the server is there and asks for patience
        self.timed_out = timed_out


class Unverified(EngineError):
    """A replica does not hold the weights that it was told to load."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long things may take.

    Attributes:
      turn_seconds: one attempt of a turn.
      start_seconds: from a server's start to its first turn, compilation included, and how long a run waits when no replica is there.
      load_seconds: one call of a weight update.
    """

    turn_seconds: float = 600.0
    start_seconds: float = 1800.0
    load_seconds: float = 900.0

    def __post_init__(self):
        wrong = {f.name: v for f in dataclasses.fields(self) if not 0 < (v := getattr(self, f.name)) < math.inf}
        if wrong:
            raise InputError(f"engine time limits must be positive and finite, got {wrong}")


class Replica:
    """One address. Nothing here retries, except that a weight update starts over while the server is unsettled.

    Args:
      address: e.g. "http://127.0.0.1:30000".
      connections: opens the shared connection pool on first use, inside the running loop.
      limits: see `Limits`.
      layout: of the published weights, "orbax" or "safetensors".
    """

    def __init__(self, address: str, connections: Callable[[], aiohttp.ClientSession], limits: Limits, layout: str):
        if not address.startswith(("http://", "https://")):
            raise InputError(f"engine address {address!r}: must look like http://127.0.0.1:30000")
        self.address = address.rstrip("/")
        self.serving = False  # whether it takes traffic
        self.versions: list[int] = []  # that it served, one after the other; the last is the current one
        self.settled = False  # whether its last update went through to the end
        self.warm = False  # whether it has completed a turn since its last start
        self.updating = asyncio.Lock()
        self._connections = connections
        self._limits = limits
        self._layout = layout

    # ------------------------------------------------------------------------------------------------------------- turns

    async def generate(self, request: str, prompt_ids: Sequence[int], session: Session, sampling: Sampling) -> Completion:
        """One attempt of a turn. Raises Transient, or EngineError when the server refuses it for good."""
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_ids),
            "sampling_seed": wire.sampling_seed(session),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.banned_ids:
            parameters["logit_bias"] = {str(i): wire.BANNED for i in sampling.banned_ids}
        body = {"rid": request, "input_ids": list(prompt_ids), "sampling_params": parameters, "return_logprob": True, "logprob_start_len": -1}
        started = asyncio.get_running_loop().time()
        served = len(self.versions) - 1
        answer = await self.call("POST", "/generate", body, self._limits.turn_seconds if self.warm else self._limits.start_seconds)
        completion = self._completion(answer, asyncio.get_running_loop().time() - started)
        allowed = self.versions[served:]
        if not set(completion.weight_versions) <= set(allowed):
            raise Transient(f"{self.address} sampled with weights {completion.weight_versions}, it was told to serve {allowed}")
        self.warm = True
        return completion

    def _completion(self, answer: Any, latency: float) -> Completion:
        try:
            meta, ids = answer["meta_info"], tuple(answer["output_ids"])
            sampled = [(math.nan if logprob is None else float(logprob), i) for logprob, i, *_ in meta["output_token_logprobs"]]
            spans = [span["version"] for span in meta.get("weight_versions") or ()] or [meta["weight_version"]]
            # Before the first update a version is a word; no number stands for it.
            versions = tuple(int(v) if str(v).isdigit() else -1 for v in dict.fromkeys(spans))
            if tuple(i for _, i in sampled) != ids or not all(type(i) is int for i in ids):
                raise ValueError("output_ids are not the ids of output_token_logprobs")
            reason = meta["finish_reason"]["type"]
            return Completion(ids, tuple(p for p, _ in sampled), reason, versions, int(meta["cached_tokens"]), latency)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise Transient(f"{self.address} answered a turn with something else ({type(e).__name__}: {e}): {str(answer)[:200]}") from e

    async def abort(self, request: str) -> None:
        """Makes the server forget a turn, or with `session.id + "/"` a session; one attempt."""
        try:
            await self.call("POST", "/abort_request", {"rid": request}, _ABORT_SECONDS, parse=False)
        except (Transient, EngineError):
            pass  # it is gone, and the turn with it

    # ----------------------------------------------------------------------------------------------------------- weights

    async def version_name(self) -> str:
        """What the server calls its weights. Any process that holds the port answers this at once, whatever it compiles."""
        answer = await self.call("GET", "/model_info", None, _QUICK_SECONDS)
        return str(answer.get("weight_version"))

    async def digest(self) -> str:
        """The digest of the live parameters; needs one update through our loader before. Raises Unverified with the loader's words."""
        answer = await self.call("POST", "/get_weights_by_name", {"name": wire.QUESTION, "truncate_size": 1 << 30}, self._limits.load_seconds)
        try:
            said = json.loads(bytes(int(number) for number in answer))
            error, digest = said["error"], said["digest"]
        except (KeyError, TypeError, ValueError) as e:
            raise Unverified(
                f"{self.address} does not tell its digest ({str(answer)[:200]}): start it with --custom-weight-loader {wire.LOADER}"
            ) from e
        if error:
            raise Unverified(f"{self.address} did not load the weights: {error}")
        return digest

    async def update(self, published: Published) -> None:
        """Returns when the server serves exactly `published`. Raises Transient, or Unverified and leaves the server paused."""
        self.settled = False
        info = await self.call("GET", "/server_info", None, self._limits.load_seconds)
        self._check_version(info)
        ranks = int(info.get("tp_size") or 1)
        load = self._limits.load_seconds
        await self.call("POST", "/pause_generation", {"mode": "retract"}, load)
        kind = wire.LOAD
        if self._layout == manifest.SAFETENSORS:
            kind = wire.ATTACH
            disk = {"model_path": str(Path(published.path) / manifest.ARRAYS), "flush_cache": True, "abort_all_requests": False}
            await self.call("POST", "/update_weights_from_disk", disk, load)
        await self._open_session()
        tensors = [wire.write_payload(kind, published.path)] * ranks
        await self.call(
            "POST",
            "/update_weights_from_tensor",
            {"serialized_named_tensors": tensors, "load_format": wire.LOADER, "flush_cache": True, "abort_all_requests": False},
            load,
        )
        await self.call("POST", "/end_weight_update", {}, load)
        found = await self.digest()
        if found != published.digest:
            raise Unverified(
                f"{self.address} holds weights with digest {found[:12]}, version {published.version} has {published.digest[:12]}: "
                "it serves a mixture; restart it and resume the run"
            )
        await self.call("POST", "/update_weight_version", {"new_version": str(published.version), "abort_all_requests": False}, load)
        self.versions.append(published.version)
        await self.call("POST", "/continue_generation", {}, load)
        self.settled = True

    async def lend_memory(self) -> None:
        """Gives up the memory of weights and caches on the devices; there must be no turn. Until it is back, only the weights' version is known."""
        self.settled = False  # what the weights' memory holds afterwards is anything: only an update makes it good
        await self.call("POST", "/pause_generation", {"mode": "retract"}, self._limits.load_seconds)
        await self.call("POST", "/release_memory_occupation", {}, self._limits.load_seconds, parse=False)

    async def take_memory_back(self) -> None:
        """Takes it back, except where the server was restarted meanwhile: that one has lent nothing, and does not survive being asked."""
        if await self.version_name() == str(self.versions[-1]):
            await self.call("POST", "/resume_memory_occupation", {}, self._limits.load_seconds, parse=False)

    async def _open_session(self) -> None:
        try:
            await self.call("POST", "/begin_weight_update", {}, self._limits.load_seconds)
        except EngineError:  # a client that was killed left one open
            await self.call("POST", "/end_weight_update", {}, self._limits.load_seconds)
            await self.call("POST", "/begin_weight_update", {}, self._limits.load_seconds)

    def _check_version(self, info: Mapping[str, Any]) -> None:
        numbers = str(info.get("version", "")).split(".")[:3]
        digits = [int("".join(c for c in n if c.isdigit()) or 0) for n in numbers]
        if tuple(digits) < OLDEST:
            raise EngineError(f"{self.address} runs SGLang {info.get('version')}: {'.'.join(map(str, OLDEST))} or newer is needed")

    # ---------------------------------------------------------------------------------------------------------- requests

    async def call(self, method: str, path: str, body: Any, seconds: float, parse: bool = True) -> Any:
        """One attempt. Raises Transient for what may pass, EngineError for a refusal."""
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, _QUICK_SECONDS))
        try:
            async with self._connections().request(method, self.address + path, json=body, timeout=limit) as response:
                text = await response.text()
        except TimeoutError as e:
            raise Transient(f"{method} {self.address}{path} was not answered in {seconds:g} s", timed_out=True) from e
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as e:
            raise Transient(f"{method} {self.address}{path}: {type(e).__name__}: {e}") from e
        if response.status in _RETRIED or response.status >= 500:
            raise Transient(f"{method} {self.address}{path}: status {response.status}: {text[:200]}", busy=response.status in _RETRIED)
        if response.status >= 400:
            raise EngineError(f"{self.address} refused {path}: status {response.status}: {text[:300]}")
        if not parse:
            return None
        try:
            return json.loads(text)
        except ValueError as e:
            raise Transient(f"{method} {self.address}{path}: the answer is no JSON: {text[:100]!r}") from e
