"""What every handler of the service shares: JSON in and out, and errors that always leave as {"error", "message"}."""

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """An answer with a 4xx or 503 status."""

    def __init__(self, status: int, error: str, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.error, self.headers = status, error, headers


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def json_answer(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


async def read_object(request: web.Request, required: set[str], allowed: set[str]) -> dict[str, Any]:
    """The request's JSON object, or a 400 that names what is wrong with its shape."""
    try:
        body = json.loads(await request.read(), parse_constant=_reject_constant, parse_float=_finite)
    except (ValueError, RecursionError) as e:
        raise Refusal(400, "bad_json", f"the body must be a JSON object: {e!s:.120}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "bad_json", f"the body must be a JSON object, got {type(body).__name__}")
    if unknown := set(body) - allowed:
        raise Refusal(400, "unknown_field", f"unknown fields {sorted(unknown)[:5]!r:.200}; known are {sorted(allowed)}")
    if missing := required - set(body):
        raise Refusal(400, "missing_field", f"missing fields {sorted(missing)}")
    return body


@web.middleware
async def typed_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves as JSON {"error", "message"}."""
    try:
        return await handler(request)
    except Refusal as e:
        return json_answer(dumps({"error": e.error, "message": str(e)}), e.status, e.headers)
    except web.HTTPException as e:
        names = {404: "unknown_route", 405: "method_not_allowed", 413: "body_too_large"}
        return json_answer(dumps({"error": names.get(e.status, "http_error"), "message": e.text or e.reason}), e.status)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        return json_answer(dumps({"error": "internal", "message": "a bug in the shop; its log has the traceback"}), 500)
