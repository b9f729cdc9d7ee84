"""The page for people: plain files, read once, served by the same process as the shop."""

import importlib.resources

from aiohttp import web

_FILES = {"/play": ("play.html", "text/html"), "/play.js": ("play.js", "text/javascript"), "/play.css": ("play.css", "text/css")}
# Nothing from elsewhere and nothing inline: text of the catalogue can never become code.
_HEADERS = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


def routes() -> list[web.RouteDef]:
    return [web.get(path, _serve(name, content_type)) for path, (name, content_type) in _FILES.items()]


def _serve(name: str, content_type: str):
    text = (importlib.resources.files("shop_env.ui") / name).read_text(encoding="utf-8")

    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=_HEADERS)

    return handler
