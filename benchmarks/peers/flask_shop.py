"""The peer of the shop service: a threaded Flask server with the same pages and one FTS5 query for each search. Run by bench_shop_server.py.

    python benchmarks/peers/flask_shop.py --catalogue DIR --port 0

It keeps episodes as simply as such servers do: a dict, no leases, no sequence numbers, no capacity. Pages come from the same state machine.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent.parent)]

from flask import Flask, request  # noqa: E402
from fts5 import Fts5Index  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

from shop_env.reward import public_detail  # noqa: E402
from shop_env.session import Session, Shop  # noqa: E402
from shop_env.tasks import World  # noqa: E402


def make_app(shop: Shop) -> Flask:
    app = Flask("shop")
    episodes: dict[str, Session] = {}
    numbers = itertools.count()

    @app.post("/v1/episodes")
    def open_episode():
        session = Session(shop, shop.task(request.get_json()["task_id"]))
        episode_id = f"e{next(numbers)}"
        episodes[episode_id] = session
        return {"episode_id": episode_id, "observation": session.observation, "state": session.state}, 201

    @app.post("/v1/episodes/<episode_id>/step")
    def step(episode_id: str):
        body = request.get_json()
        taken = episodes[episode_id].step(body["tool"], body["arguments"])
        answer = {"observation": taken.observation, "state": taken.state, "feedback": taken.feedback, "done": taken.done}
        if taken.done:
            answer |= {"reward": taken.reward, "success": taken.success, "reward_detail": dict(public_detail(taken.reward_detail))}
        return answer

    @app.delete("/v1/episodes/<episode_id>")
    def close(episode_id: str):
        del episodes[episode_id]
        return {}

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--catalogue", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    world = World.load(arguments.catalogue)
    with tempfile.TemporaryDirectory() as directory:
        index = Fts5Index(world.catalog, f"{directory}/shop.db")  # a file: every thread reads it through a connection of its own
        server = make_server("127.0.0.1", arguments.port, make_app(Shop(world, index=index)), threaded=True)  # type: ignore[arg-type]
        print(f"flask: {len(world.catalog)} products on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
