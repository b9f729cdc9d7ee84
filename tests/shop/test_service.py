"""The real application on a loopback port: contract of every route, and what happens when clients misbehave."""

import asyncio
import contextlib
import json
import math
import socket
import time

import aiohttp
import pytest
from aiohttp import web

from shop_env.client import ShopClient
from shop_env.errors import InvalidSetting, PortBusy, ShopRefused, ShopUnavailable
from shop_env.server import KEY_HEADER, ServerThread, make_app
from shop_env.session import TOOLS

from .conftest import KEY

BUY_MUG = [("search", {"query": "ceramic"}), ("click", {"target": "A"}), ("click", {"target": "buy now"})]


@pytest.fixture(scope="module")
def server(shop):
    with ServerThread(shop, privileged_key=KEY, max_body_bytes=4096) as running:
        yield running


def ask(url, *requests, headers=None):
    """(status, JSON answer) of each (method, path, body), in order; a bytes body is sent as it is."""

    async def run():
        answers = []
        async with aiohttp.ClientSession(headers=headers) as http:
            for method, path, body in requests:
                data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
                async with http.request(method, url + path, data=data) as response:
                    answers.append((response.status, await response.json()))
        return answers

    return asyncio.run(run())


def with_client(url, body, **settings):
    async def run():
        async with ShopClient(url, **settings) as client:
            return await body(client)

    return asyncio.run(run())


def open_episode(url, task_id="task-mug"):
    ((status, answer),) = ask(url, ("POST", "/v1/episodes", {"task_id": task_id}))
    assert status == 201
    return answer["episode_id"]


def step_request(episode_id, seq, tool, arguments):
    return "POST", f"/v1/episodes/{episode_id}/step", {"seq": seq, "tool": tool, "arguments": arguments}


# ----------------------------------------------------------------------------------------------------------- contract


def test_an_episode_over_http(server, shop):
    async def body(client):
        assert await client.tools() == TOOLS
        (task,) = await client.tasks("dev")
        opened = await client.open(task.id)
        assert (opened.task.id, opened.task.instruction, opened.observation) == ("task-mug", "a mug", "search page")
        steps = [await client.step(opened.episode_id, *action) for action in BUY_MUG]
        await client.close(opened.episode_id)
        await client.close(opened.episode_id)  # already gone: fine
        return steps

    first, _, last = with_client(server.url, body)
    assert first.observation == "results 1-1 of 1 | back to search\nA plain mug $5" and first.feedback == "ok" and not first.done
    assert (last.done, last.status, last.reward, last.success, last.observation) == (True, "purchase", 1.0, True, "done")
    assert last.reward_detail["r_type"] == 1.0 and "goal_product_id" not in last.reward_detail


def test_privileged_callers_see_goals_and_products(server):
    async def body(client):
        opened = await client.open("task-mug", privileged=True)
        last = [await client.step(opened.episode_id, *action) for action in BUY_MUG][-1]
        return await client.goal("task-jacket"), await client.product("zzid-mug"), last.reward_detail

    goal, product, detail = with_client(server.url, body, privileged_key=KEY)
    assert goal["product_id"] == "zzid-03" and goal["price_ceiling"] == 31.41 and goal["full_instruction"] == "zz full instruction"
    assert product["title"] == "plain mug"
    assert detail["goal_product_id"] == "zzid-mug" and detail["attribute_hits"] == ["ceramic"]


def test_others_do_not(server):
    async def body(client):
        for refused in (client.goal("task-mug"), client.product("zzid-mug"), client.open("task-mug", privileged=True)):
            with pytest.raises(ShopRefused) as e:
                await refused
            assert (e.value.status, e.value.error) == (403, "not_privileged")

    with_client(server.url, body)
    with_client(server.url, body, privileged_key="wrong")


def test_a_task_can_be_brought_along_by_a_privileged_caller(server, world):
    task = {**world.tasks["task-mug"].to_json(), "id": "own"}
    key = {KEY_HEADER: KEY}
    assert ask(server.url, ("POST", "/v1/episodes", {"task": task}))[0][0] == 403
    ((status, answer),) = ask(server.url, ("POST", "/v1/episodes", {"task": task}), headers=key)
    assert status == 201 and answer["task"] == {"id": "own", "instruction": "a mug", "persona": {}}
    for bad in ({}, 3, {**task, "goal": {**task["goal"], "product_id": "nope"}}, {**task, "persona": 3, "extra": 1}):
        assert ask(server.url, ("POST", "/v1/episodes", {"task": bad}), headers=key)[0][1]["error"] == "bad_field"


def test_nothing_private_leaves_before_the_end(server):
    episode = open_episode(server.url, "task-jacket")
    actions = [("search", {"query": "jacket"}), ("click", {"target": "A"}), ("click", {"target": "red"}), ("click", {"target": "nope"})]
    requests = [step_request(episode, i, *action) for i, action in enumerate(actions, 1)]
    requests += [("GET", f"/v1/episodes/{episode}", None), ("GET", "/v1/tasks?split=train", None), ("GET", "/healthz", None)]
    answers = ask(server.url, *requests)
    assert all(status == 200 for status, _ in answers)
    assert "zz" not in json.dumps(answers) and "31.41" not in json.dumps(answers)
    transcript = answers[-3][1]
    assert [s["feedback"] for s in transcript["steps"]] == ["ok", "ok", "ok", "unavailable_target"] and transcript["state"]["page"] == "selection"
    assert [s["tool"] for s in transcript["steps"]] == [tool for tool, _ in actions]
    # The end itself reveals the outcome, not the goal: only the ids that the buyer chose.
    ((_, end),) = ask(server.url, step_request(episode, 5, "click", {"target": "size=large"}))
    ((_, end),) = ask(server.url, step_request(episode, 6, "click", {"target": "buy now"}))
    assert end["done"] and "secret" not in json.dumps(end) and "31.41" not in json.dumps(end) and "zzid-03" not in json.dumps(end)


def test_metrics_and_health(server, world):
    with_client(server.url, lambda client: client.open("task-mug"))

    async def text():
        async with aiohttp.ClientSession() as http, http.get(server.url + "/metrics") as response:
            return await response.text()

    lines = asyncio.run(text()).splitlines()
    assert any(line.startswith("shop_opened_total ") for line in lines)
    ((_, health),) = ask(server.url, ("GET", "/healthz", None))
    assert health["ok"] and health["catalog"] == world.catalog.hash and health["splits"] == {"train": 1, "dev": 1}


async def test_the_page_may_load_nothing_from_elsewhere(aiohttp_client, shop):
    client = await aiohttp_client(make_app(shop))
    for path in ("/play", "/play.js", "/play.css"):
        async with client.get(path) as response:
            text = await response.text()
            assert response.status == 200 and "default-src 'self'" in response.headers["Content-Security-Policy"]
            assert "http" not in text.replace("HTTP", "") and "innerHTML" not in text


# ---------------------------------------------------------------------------------------------------- sequence numbers


def test_a_repeated_step_is_answered_again_and_not_executed_twice(server):
    episode = open_episode(server.url)
    once = step_request(episode, 1, *BUY_MUG[0])
    first, again, other, gap, zero = ask(
        server.url, once, once, step_request(episode, 1, *BUY_MUG[1]), step_request(episode, 3, *BUY_MUG[1]), step_request(episode, 0, *BUY_MUG[1])
    )
    assert first == again and first[0] == 200 and first[1]["seq"] == 1
    assert (other[0], other[1]["error"]) == (409, "sequence_conflict")
    assert (gap[0], gap[1]["error"]) == (409, "sequence_gap") == (zero[0], zero[1]["error"])
    second, last, last_again, ended = ask(
        server.url,
        step_request(episode, 2, *BUY_MUG[1]),
        step_request(episode, 3, *BUY_MUG[2]),
        step_request(episode, 3, *BUY_MUG[2]),
        step_request(episode, 4, *BUY_MUG[0]),
    )
    assert second[1]["seq"] == 2
    assert last == last_again and last[1]["reward"] == 1.0
    assert (ended[0], ended[1]["error"]) == (410, "episode_ended")


def test_two_clients_on_one_episode(server):
    async def body(one):
        async with ShopClient(server.url) as two:
            opened = await one.open("task-mug")
            await one.step(opened.episode_id, "search", {"query": "ceramic"})
            with pytest.raises(ShopRefused) as e:
                await two.step(opened.episode_id, "search", {"query": "jacket"})
            assert e.value.error == "sequence_conflict"
            return (await one.step(opened.episode_id, "click", {"target": "A"})).feedback

    assert with_client(server.url, body) == "ok"


# ------------------------------------------------------------------------------------------------------- bad requests

STEP = {"seq": 1, "tool": "search", "arguments": {"query": "mug"}}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("POST", "/v1/episodes", b"", 400, "bad_json"),
        ("POST", "/v1/episodes", b"\xff\xfe{", 400, "bad_json"),
        ("POST", "/v1/episodes", b'{"task_id": NaN}', 400, "bad_json"),
        ("POST", "/v1/episodes", b"[" * 4000, 400, "bad_json"),
        ("POST", "/v1/episodes", [1], 400, "bad_json"),
        ("POST", "/v1/episodes", {}, 400, "bad_field"),
        ("POST", "/v1/episodes", {"task_id": 3}, 400, "bad_field"),
        ("POST", "/v1/episodes", {"task_id": "task-mug", "privileged": 1}, 400, "bad_field"),
        ("POST", "/v1/episodes", {"task_id": "task-mug", "colour": 1}, 400, "unknown_field"),
        ("POST", "/v1/episodes", {"task_id": "nope"}, 404, "unknown_task"),
        ("POST", "/v1/episodes", b" " * 5000, 413, "body_too_large"),
        ("POST", "/v1/episodes/{id}/step", {}, 400, "missing_field"),
        ("POST", "/v1/episodes/{id}/step", {**STEP, "seq": True}, 400, "bad_field"),
        ("POST", "/v1/episodes/{id}/step", {**STEP, "seq": "1"}, 400, "bad_field"),
        ("POST", "/v1/episodes/{id}/step", {**STEP, "tool": None}, 400, "bad_field"),
        ("POST", "/v1/episodes/{id}/step", {**STEP, "arguments": [1]}, 400, "bad_field"),
        ("POST", "/v1/episodes/{id}/step", {**STEP, "more": 1}, 400, "unknown_field"),
        ("POST", "/v1/episodes/nope/step", STEP, 404, "unknown_episode"),
        ("GET", "/v1/episodes/nope", None, 404, "unknown_episode"),
        ("DELETE", "/v1/episodes/nope", None, 404, "unknown_episode"),
        ("GET", "/v1/tasks", None, 404, "unknown_split"),
        ("GET", "/v1/tasks?split=nope", None, 404, "unknown_split"),
        ("GET", "/v1/nothing", None, 404, "unknown_route"),
        ("PUT", "/v1/episodes", {}, 405, "method_not_allowed"),
    ],
)
def test_bad_requests_get_typed_answers(server, method, path, body, status, error):
    if "{id}" in path:
        path = path.replace("{id}", open_episode(server.url))
    ((got, answer),) = ask(server.url, (method, path, body))
    assert (got, answer["error"]) == (status, error) and answer["message"]


def test_odd_but_valid_arguments_are_the_agents_business(server):
    episode = open_episode(server.url)
    odd = [{"query": "\ud800"}, {"query": [1, 2]}, {"query": ["a", "b"]}, {"target": {"x": [None]}}, {"query": 10**30}]
    answers = ask(server.url, *(step_request(episode, i, "search", arguments) for i, arguments in enumerate(odd, 1)))
    assert [a["feedback"] for _, a in answers] == ["ok", "invalid_format", "multiple_actions", "invalid_format", "invalid_format"]
    assert ask(server.url, ("GET", f"/v1/episodes/{episode}", None))[0][0] == 200


# --------------------------------------------------------------------------------------------- leases, capacity, kills


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_idle_episodes_expire_and_leave_room(shop):
    with ServerThread(shop, lease_seconds=0.2, capacity=400) as server:

        async def abandon():
            async with aiohttp.ClientSession() as http:

                async def one():
                    async with http.post(server.url + "/v1/episodes", json={"task_id": "task-mug"}) as response:
                        return response.status

                return [await asyncio.gather(*(one() for _ in range(200))) for _ in range(5)]

        assert {status for wave in asyncio.run(abandon()) for status in wave} == {201}  # more than fit at once: old ones made room
        episode = open_episode(server.url)
        wait_until(lambda: not server.service.episodes)
        assert server.service.counts["expired"] == server.service.counts["opened"] == 1001
        ((status, answer),) = ask(server.url, step_request(episode, 1, *BUY_MUG[0]))
        assert (status, answer["error"]) == (404, "unknown_episode")


def test_stepping_renews_the_lease(shop):
    with ServerThread(shop, lease_seconds=0.5) as server:
        episode = open_episode(server.url)
        for i in range(1, 5):
            time.sleep(0.2)
            assert ask(server.url, step_request(episode, i, *BUY_MUG[0]))[0][0] == 200


def test_beyond_capacity_opening_waits_and_is_then_refused(shop):
    with ServerThread(shop, capacity=1, open_wait_seconds=0.2) as server:
        episode = open_episode(server.url)

        async def crowded():
            async with aiohttp.ClientSession() as http, http.post(server.url + "/v1/episodes", json={"task_id": "task-mug"}) as response:
                return response.status, (await response.json())["error"], response.headers["Retry-After"]

        assert asyncio.run(crowded()) == (503, "at_capacity", "1")
        ask(server.url, *(step_request(episode, i, *action) for i, action in enumerate(BUY_MUG, 1)))
        other = open_episode(server.url)  # a finished episode takes no room

        async def waits(client):
            opening = asyncio.create_task(client.open("task-mug"))
            await asyncio.sleep(0.05)
            await client._call("DELETE", f"/v1/episodes/{other}")
            return await opening

        assert with_client(server.url, waits).observation == "search page"


def test_a_client_killed_in_the_middle_of_a_request_hurts_nobody(shop):
    with ServerThread(shop, capacity=1) as server:
        port = int(server.url.rsplit(":", 1)[1])
        for text in (b"POST /v1/episodes HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{", b"\x00\x01\r\n\r\n", b"GET /v1/tools HTT"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(text)
        assert open_episode(server.url)
        assert len(server.service.episodes) == 1


def test_a_busy_port_and_bad_settings_are_named(server, shop):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(PortBusy, match=f"port {port} .*choose another"), ServerThread(shop, port=port):
        pass
    infinite = [{name: value} for name in ("lease_seconds", "open_wait_seconds") for value in (math.inf, math.nan)]  # JSON has no word for these
    for bad in ({"capacity": 0}, {"lease_seconds": -1}, {"open_wait_seconds": -1}, {"privileged_key": ""}, *infinite):
        with pytest.raises(InvalidSetting, match=next(iter(bad))), ServerThread(shop, **bad):
            pass


# ------------------------------------------------------------------------------------------------------------- retries


@contextlib.asynccontextmanager
async def lossy_proxy(target_port: int, lose_every: int):
    """Forwards to the target, and cuts the connection instead of passing on every n-th answer."""
    answers = 0

    async def handle(reader, writer):
        nonlocal answers
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", target_port)
        try:
            while request := await reader.read(65536):
                upstream_writer.write(request)
                answer = await upstream_reader.read(65536)
                answers += 1
                if answers % lose_every == 0:
                    break
                writer.write(answer)
        finally:
            writer.close()
            upstream_writer.close()

    proxy = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with proxy:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


def test_a_lost_answer_is_asked_for_again_and_the_step_runs_once(shop):
    with ServerThread(shop) as server:

        async def run():
            async with (
                lossy_proxy(int(server.url.rsplit(":", 1)[1]), lose_every=3) as url,
                ShopClient(url, backoff_seconds=(0.01,) * 5) as client,
            ):
                opened = await client.open("task-jacket")
                seen = []
                for i in range(7):
                    seen.append((await client.step(opened.episode_id, "search", {"query": f"jacket {i}"})).feedback)
                return seen, server.service.episodes[opened.episode_id].session.steps

        assert asyncio.run(run()) == (["ok"] * 7, 7)
        assert server.service.counts["steps"] == 7 and server.service.counts["replayed"] >= 2


def test_5xx_is_retried_and_4xx_is_not():
    calls = []

    async def tools(_):
        calls.append("tools")
        return web.json_response({"tools": []}, status=200 if len(calls) == 3 else 502)

    async def tasks(_):
        calls.append("tasks")
        return web.json_response({"error": "unknown_split", "message": "m"}, status=404)

    async def page(_):
        return web.Response(text="<html>")

    async def run():
        app = web.Application()
        app.add_routes([web.get("/v1/tools", tools), web.get("/v1/tasks", tasks), web.get("/v1/products/x", page)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with ShopClient(f"http://127.0.0.1:{runner.addresses[0][1]}", backoff_seconds=(0.01, 0.01)) as client:
            assert await client.tools() == []
            with pytest.raises(ShopRefused, match="unknown_split"):
                await client.tasks("x")
            with pytest.raises(ShopUnavailable, match="is this address a shop"):
                await client.product("x")
        await runner.cleanup()

    asyncio.run(run())
    assert calls == ["tools"] * 3 + ["tasks"]


def test_a_shop_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ShopUnavailable, match="failed 2 times.*is the shop running there"):
        with_client(url, lambda client: client.open("task-mug"), backoff_seconds=(0.01,))


def test_a_client_may_go_on_with_anothers_episode(shop):
    with ServerThread(shop) as server:
        episode = open_episode(server.url)

        async def body(client):
            return [await client.step(episode, *action) for action in BUY_MUG][-1].reward

        assert with_client(server.url, body) == 1.0
        assert not server.service.episodes  # the last client closes it


def test_an_episode_keeps_its_connection_and_hands_it_on(shop):
    """Behind one port there may be several workers: on one connection, all of an episode's requests reach the one that holds it."""
    seen: dict[str, set] = {}

    @web.middleware
    async def note(request, handler):
        answer = await handler(request)
        episode = request.match_info.get("id") or json.loads(answer.body).get("episode_id")
        seen.setdefault(episode, set()).add(request.transport.get_extra_info("peername"))
        return answer

    async def run():
        app = make_app(shop)
        app.middlewares.append(note)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with ShopClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:

            async def play():
                opened = await client.open("task-mug")
                for action in BUY_MUG:
                    await client.step(opened.episode_id, *action)
                return opened.episode_id

            first = await asyncio.gather(*(play() for _ in range(4)))
            assert [len(seen[episode]) for episode in first] == [1] * 4
            assert len(set.union(*(seen[episode] for episode in first))) == 4
            await client.close(first[0])
            later = await play()
            assert seen[later] == seen[first[0]]  # the connection that became free
        await runner.cleanup()

    asyncio.run(run())


def test_leaving_the_client_closes_its_episodes(shop):
    with ServerThread(shop) as server:

        async def body(client):
            for _ in range(3):
                await client.open("task-mug")
            assert len(server.service.episodes) == 3

        with_client(server.url, body)
        assert not server.service.episodes
