"""The embedded engine behind SGLang's HTTP contract, so that a host without SGLang (a TPU's) can serve rollouts.

Routes, fields and refusals are SGLang's, as far as `rollout.replica` uses them; a client cannot tell the two apart. What differs is inside: a
turn's session and noise come from its request id and sampling seed (see `rollout.wire`), `text` is empty because there is no tokenizer here,
and an update that fails is answered with 400, where SGLang's loader can only say so when it is asked for its digest.
"""

import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from intraskill import weights
from intraskill.rollout import wire
from intraskill.rollout.jax_engine import JaxEngine
from intraskill.rollout.scheduler import NotContinued, Refused
from intraskill.types import Completion, EngineError, InputError, Sampling, Session

log = logging.getLogger(__name__)

CONTRACT = "0.5.23"  # the SGLang release whose routes these are
_MAX_BODY = 64 << 20
_IGNORED = {"skip_special_tokens", "no_stop_trim"}  # ids in, ids out: nothing is ever decoded or trimmed
_SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "sampling_seed", "logit_bias"}


def _error(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _outcome(success: bool, message: str) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)


class EngineServer:
    """The routes over one engine.

    Args:
      engine: what computes; the server is the only one that uses it.
      name: reported as the model's path.
    """

    def __init__(self, engine: JaxEngine, name: str):
        self._engine = engine
        self._name = name
        self._label = "default"  # as SGLang calls weights that were never updated
        self._loaded: int | None = None  # the version that the engine holds since the last update
        self._asked = False  # whether an update ever came, so that there is a digest to tell
        self._problem = ""
        self._updating = False  # between begin_weight_update and end_weight_update
        self._turns: dict[str, str] = {}  # session -> the request that is computed for it
        self._aborted: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_refusals])
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        handlers: dict[str, Callable[[dict[str, Any]], Coroutine[Any, Any, web.Response]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weight_version": self._name_version,
            "/get_weights_by_name": self._digest,
        }
        for path, handler in handlers.items():
            app.router.add_post(path, _with_body(handler))
        return app

    # ------------------------------------------------------------------------------------------------------------- turns

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        request, ids = body.get("rid"), body.get("input_ids")
        if not isinstance(request, str) or not wire.session_of(request):
            raise InputError(f"rid is {request!r}: must be SESSION/NUMBER")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise InputError("input_ids must be a list of token ids")
        sampling, seed = _sampling(body.get("sampling_params"))
        session = Session(wire.session_of(request), (seed,))
        if session.id in self._turns:  # its answer was lost on the way, and the client asks again
            await self._abort({"rid": self._turns[session.id]})
        self._turns[session.id] = request
        try:
            try:
                completion = await self._engine.generate(ids, session=session, sampling=sampling)
            except NotContinued:  # an answer that the client never saw is part of the session
                await self._engine.release(session)
                completion = await self._engine.generate(ids, session=session, sampling=sampling)
        except Refused as e:
            return _error(str(e))
        except EngineError as e:
            if request not in self._aborted:
                return _error(str(e), 500)
            completion = Completion((), (), "abort", (), 0, 0.0)
        finally:
            self._aborted.discard(request)
            if self._turns.get(session.id) == request:
                del self._turns[session.id]
        return web.json_response(self._answer(request, len(ids), completion))

    def _answer(self, request: str, prompt_tokens: int, completion: Completion) -> dict[str, Any]:
        return {
            "text": "",
            "output_ids": list(completion.ids),
            "meta_info": {
                "id": request,
                "finish_reason": {"type": completion.finish_reason},
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(completion.ids),
                "cached_tokens": completion.cached_tokens,
                "weight_version": self._label,
                "weight_versions": [{"version": str(version)} for version in completion.weight_versions],
                "output_token_logprobs": [
                    [p if math.isfinite(p) else None, i, None] for p, i in zip(completion.logprobs, completion.ids, strict=True)
                ],
                "e2e_latency": completion.latency,
            },
        }

    async def _abort(self, body: dict[str, Any]) -> web.Response:
        request = str(body.get("rid", ""))
        session = wire.session_of(request)
        running = self._turns.get(session)
        if running is not None and running.startswith(request):
            self._aborted.add(running)
            await self._engine.release(Session(session, ()))
        elif running is None and session and request.endswith("/"):
            await self._engine.release(Session(session, ()))
        return web.Response()

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        if body.get("mode") != "retract":
            raise InputError(f"mode {body.get('mode')!r}: this engine pauses with 'retract' only")
        self._engine.pause()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: dict[str, Any]) -> web.Response:
        self._engine.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    # ----------------------------------------------------------------------------------------------------------- weights

    async def _begin(self, _: dict[str, Any]) -> web.Response:
        if self._updating:
            return _outcome(False, "a weight-update session is already open; call end_weight_update() first")
        self._updating = True
        return _outcome(True, "Success")

    async def _end(self, _: dict[str, Any]) -> web.Response:
        if not self._updating:
            return _outcome(False, "no weight-update session is open; call begin_weight_update() first")
        self._updating = False
        return _outcome(True, "Success")

    async def _update_from_tensor(self, body: dict[str, Any]) -> web.Response:
        if not self._updating:
            return _outcome(False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        if body.get("load_format") != wire.LOADER:
            return _outcome(False, f"Unknown load_format={body.get('load_format')}")
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or len(payloads) != 1:
            raise InputError("serialized_named_tensors must hold one payload: this engine is one rank")
        kind, path = wire.read_payload(payloads[0])
        if kind == wire.ATTACH:
            self._asked = True
            return _outcome(True, "Success")
        return await self._load(Path(path))

    async def _update_from_disk(self, body: dict[str, Any]) -> web.Response:
        return await self._load(Path(str(body.get("model_path", ""))).parent)

    async def _load(self, path: Path) -> web.Response:
        self._asked = True
        try:
            published = weights.find(path)
            await self._engine.load_weights(published)
        except (EngineError, InputError) as e:
            self._problem = str(e)
            log.error("weights were not loaded: %s", e)
            return _outcome(False, str(e))
        self._loaded, self._problem = published.version, ""
        return _outcome(True, "Success")

    async def _name_version(self, body: dict[str, Any]) -> web.Response:
        if body.get("new_version") != str(self._loaded):
            raise InputError(f"new_version {body.get('new_version')!r}: the engine holds version {self._loaded}")
        self._label = str(self._loaded)
        return web.json_response({"success": True, "message": f"Weight version updated to {self._label}", "new_version": self._label})

    async def _digest(self, body: dict[str, Any]) -> web.Response:
        if body.get("name") != wire.QUESTION or not self._asked:
            return _error("Get parameter by name failed")
        health = await self._engine.healthy()
        said = {"digest": "" if self._problem else health.digest, "error": self._problem}
        return web.json_response([float(byte) for byte in json.dumps(said).encode()])

    # -------------------------------------------------------------------------------------------------------------- about

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self._name, "served_model_name": self._name, "is_generation": True, "weight_version": self._label})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": CONTRACT, "tp_size": 1, "internal_states": [self._engine.metrics()]})


def _sampling(parameters: Any) -> tuple[Sampling, int]:
    """The request's sampling and its seed. Raises InputError for unknown keys and for what this engine cannot do."""
    if not isinstance(parameters, dict):
        raise InputError("sampling_params must be an object")
    unknown = sorted(set(parameters) - _SAMPLING - _IGNORED)
    if unknown:
        raise InputError(f"unknown sampling parameters {unknown}: known are {sorted(_SAMPLING)}")
    bias = parameters.get("logit_bias") or {}
    try:
        banned = tuple(sorted(int(i) for i in bias))
        if any(value > wire.BANNED for value in bias.values()):
            raise ValueError(f"this engine takes a logit_bias of {wire.BANNED:g} only")
        sampling = Sampling(
            max_new_tokens=parameters["max_new_tokens"],
            temperature=float(parameters.get("temperature", 1.0)),
            top_p=float(parameters.get("top_p", 1.0)),
            top_k=max(0, int(parameters.get("top_k", -1))),
            stop_ids=tuple(int(i) for i in parameters.get("stop_token_ids") or ()),
            banned_ids=banned,
        )
        return sampling, int(parameters["sampling_seed"])
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise InputError(f"sampling_params: {type(e).__name__}: {e}") from None


def _with_body(handler: Callable[[dict[str, Any]], Coroutine[Any, Any, web.Response]]) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except ValueError:
            raise InputError("the body is no JSON") from None
        if not isinstance(body, dict):
            raise InputError(f"the body must be an object, got {type(body).__name__}")
        return await handler(body)

    return handle


@web.middleware
async def _refusals(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    try:
        return await handler(request)
    except InputError as e:
        return _error(str(e))


@contextlib.asynccontextmanager
async def serve(engine: JaxEngine, name: str, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serves until the block ends; yields the address. A turn whose client went away is cancelled."""
    runner = web.AppRunner(EngineServer(engine, name).app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as e:
            raise InputError(f"port {port} of {host} cannot be bound ({e.strerror or e}): choose another port, or 0 for any free one") from None
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
