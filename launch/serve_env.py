r"""Runs the shop service alone.

    python -m launch.serve_env --catalogue DIR --port 8100 [--workers 4]

DIR is what `shop_env.tasks.World.save` wrote: products, tasks and splits. Up after two to six seconds (2,400 or 22,726 products); stops on
Ctrl-C or SIGTERM. People can shop at http://127.0.0.1:8100/play.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from shop_env import workers
from shop_env.errors import InvalidSetting, ShopEnvError
from shop_env.search import Index
from shop_env.session import Shop
from shop_env.tasks import World

_CATALOGUE = flags.DEFINE_string("catalogue", None, "Directory of the world to serve.")
_WORKERS = flags.DEFINE_integer("workers", 1, "Processes that share the port; about one for each two cores that are free.", 1, 1024)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to bind. The service has no user accounts: keep it on a trusted network.")
_PORT = flags.DEFINE_integer("port", 8100, "Port to bind; 0 for any free one.", 0, 65535)
_PAGE_SIZE = flags.DEFINE_integer("page_size", 20, "Rows per page of results.")
_MAX_ACTIONS = flags.DEFINE_integer("max_actions", 30, "Actions after which an episode ends with reward 0.")
_SHOW_IDS = flags.DEFINE_bool("show_ids", False, "Show product ids in result rows.")
_CAPACITY = flags.DEFINE_integer("capacity", 512, "Most episodes at once, over all workers.")
_LEASE = flags.DEFINE_float("lease_seconds", 900.0, "Idle time after which an episode is forgotten.")
_KEY_FILE = flags.DEFINE_string("privileged_key_file", None, "File with the key for goals and products; without it nobody may see them.")
_CACHE = flags.DEFINE_string("index_cache", "~/.cache/intraskill/shop", "Directory that keeps search indexes between starts; empty: none.")


def _read_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidSetting(f"--privileged_key_file {path}: unreadable ({e})") from None
    if not key:
        raise InvalidSetting(f"--privileged_key_file {path}: empty; put a long random word in it")
    return key


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise InvalidSetting(f"unexpected argument {argv[1]!r}; every setting is a --flag")
    if _CATALOGUE.value is None:
        raise InvalidSetting("--catalogue is missing: give the directory of a world")
    settings: dict[str, Any] = {"privileged_key": _read_key(_KEY_FILE.value), "lease_seconds": _LEASE.value, "capacity": _CAPACITY.value}
    world = World.load(_CATALOGUE.value)
    index = Index(world.catalog, Path(_CACHE.value).expanduser() if _CACHE.value else None)
    shop = Shop(world, _PAGE_SIZE.value, _MAX_ACTIONS.value, _SHOW_IDS.value, index)

    def started(port: int) -> None:
        print(f"shop: {len(world.catalog)} products, {len(world.tasks)} tasks on http://{_HOST.value}:{port}", flush=True)

    if _WORKERS.value == 1:
        workers.serve(shop, _HOST.value, _PORT.value, started, **settings)
    else:
        workers.Workers(shop, _WORKERS.value, _HOST.value, _PORT.value, **settings).run(started)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(list(argv))
    except flags.Error as e:
        sys.exit(_complain(str(e)))


def _complain(message: str) -> int:
    print(f"serve_env: {message}", file=sys.stderr)
    return 2


def _main(argv: Sequence[str]) -> None:
    try:
        main(argv)
    except ShopEnvError as e:
        sys.exit(_complain(str(e)))


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
