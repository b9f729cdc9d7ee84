"""A server between client and engine that breaks what passes through it."""

import asyncio
import collections
import contextlib
import json
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

Answer = tuple[int, bytes]


class Proxy:
    """Forwards every request to `target`.

    `before(path, count)` may answer in the server's place: (status, body), "drop" the connection, "hang", or wait for that many seconds.
    `after(path, answer)` may change the JSON that comes back. `count` is 1 for the first call of a path.
    """

    def __init__(self, target: str):
        self.target = target
        self.before: Callable[[str, int], Answer | str | float | None] = lambda path, count: None
        self.after: Callable[[str, Any], Any] = lambda path, answer: answer
        self.calls: list[tuple[str, Any]] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body, path = await request.read(), request.path
        self.counts[path] += 1
        self.calls.append((path, json.loads(body) if body else None))
        fault = self.before(path, self.counts[path])
        if fault == "hang" or isinstance(fault, float):
            await asyncio.sleep(fault if isinstance(fault, float) else 3600)
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(fault, tuple):
            return web.Response(status=fault[0], body=fault[1])
        headers = {"Content-Type": "application/json"}
        async with self._http.request(request.method, self.target + path, data=body, headers=headers) as answer:
            text = await answer.read()
        if text and answer.status == 200:
            changed = self.after(path, json.loads(text))
            text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        return web.Response(status=answer.status, body=text)

    @contextlib.asynccontextmanager
    async def serve(self):
        """Yields the address. A client that goes away cancels the request on the server too."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        async with aiohttp.ClientSession() as self._http:
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()
