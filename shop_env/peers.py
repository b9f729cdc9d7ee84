"""Several processes behind one port: an episode lives in the worker that its id names, and any worker passes a request on to that one.

The kernel gives a connection to whichever worker it likes (SO_REUSEPORT). Workers reach each other over unix sockets in a directory that only
their user may enter, speaking the same HTTP; the header below marks what has been passed on, so that nothing is passed on twice.
"""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from shop_env.answers import Handler, Refusal

FORWARDED = "X-Shop-Forwarded"
KEY_HEADER = "X-Privileged-Key"
_OWNER = re.compile(r"([0-9]{1,4})-[A-Za-z0-9_-]+")
_SECONDS = 30.0  # for one request to another worker, which answers without waiting


class Peers:
    """This worker's view of all workers.

    Args:
      number: of this worker.
      sockets: the unix socket of every worker, by number.
    """

    def __init__(self, number: int, sockets: Sequence[Path]):
        self.number = number
        self.others = [i for i in range(len(sockets)) if i != number]
        self._sockets = sockets
        self._http: dict[int, aiohttp.ClientSession] = {}

    @property
    def socket(self) -> Path:
        return self._sockets[self.number]

    def new_id(self) -> str:
        return f"{self.number}-{secrets.token_urlsafe(12)}"

    def owner(self, request: web.Request) -> int | None:
        """The other worker that holds the request's episode; None when it is this one's business."""
        match = _OWNER.fullmatch(request.match_info.get("id", "")) if request.path.startswith("/v1/episodes/") else None
        return int(match[1]) if match and int(match[1]) in self.others and FORWARDED not in request.headers else None

    @web.middleware
    async def forward(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: requests for an episode of another worker are answered by that worker."""
        owner = self.owner(request)
        return await (handler(request) if owner is None else self.pass_on(owner, request))

    async def pass_on(self, number: int, request: web.Request) -> web.Response:
        """Another worker's answer to this request, or 503 when that worker does not answer; its episodes are lost if it died."""
        headers = {name: request.headers[name] for name in (KEY_HEADER, "Content-Type") if name in request.headers}
        try:
            return await self._ask(number, request.method, request.raw_path, await request.read(), headers)
        except (aiohttp.ClientError, TimeoutError):
            message = f"worker {number}, which has this episode, does not answer; try again"
            raise Refusal(503, "worker_unavailable", message, {"Retry-After": "1"}) from None

    async def ask_all(self, path: str) -> list[dict[str, Any]]:
        """The JSON objects with which the others answer GET `path`; one that does not answer is left out."""

        async def one(number: int) -> dict[str, Any] | None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                return json.loads((await self._ask(number, "GET", path, b"", {})).body or b"{}")  # type: ignore[arg-type]

        return [answer for answer in await asyncio.gather(*map(one, self.others)) if answer is not None]

    async def _ask(self, number: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> web.Response:
        if number not in self._http:
            connector = aiohttp.UnixConnector(str(self._sockets[number]), limit=0)
            self._http[number] = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_SECONDS))
        url = URL(f"http://worker{path}", encoded=True)
        async with self._http[number].request(method, url, data=body, headers={**headers, FORWARDED: "1"}) as answer:
            kept = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type, headers=kept)

    async def connections(self, _: web.Application) -> AsyncIterator[None]:
        """Cleanup context: closes the connections to the others when the application stops."""
        yield
        for http in self._http.values():
            await http.close()
