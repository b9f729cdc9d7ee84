"""Several workers behind one port, as a person starts them, and what becomes of them when somebody dies."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import aiohttp
import psutil
import pytest

from shop_env.client import ShopClient
from shop_env.errors import InvalidSetting
from shop_env.peers import KEY_HEADER, Peers
from shop_env.server import SERVICE, make_app, start
from shop_env.workers import Workers

from .conftest import KEY

BUY_MUG = [("search", {"query": "ceramic"}), ("click", {"target": "A"}), ("click", {"target": "buy now"})]


@contextlib.asynccontextmanager
async def two_workers(shop, tmp_path, **settings):
    """Both in this loop, each on a port of its own: which one a request reaches is the test's choice."""
    sockets = [tmp_path / "0.sock", tmp_path / "1.sock"]
    apps = [make_app(shop, peers=Peers(i, sockets), privileged_key=KEY, **settings) for i in range(2)]
    runners = [await start(app, "127.0.0.1", 0) for app in apps]
    async with aiohttp.ClientSession() as http:
        yield http, [f"http://127.0.0.1:{port}" for _, port in runners], [app[SERVICE] for app in apps], [runner for runner, _ in runners]
    for runner, _ in runners:
        await runner.cleanup()


async def ask(http, method, url, body=None, **headers):
    async with http.request(method, url, json=body, headers=headers) as response:
        return response.status, await response.json()


def step(seq, action):
    return {"seq": seq, "tool": action[0], "arguments": action[1]}


async def test_a_request_that_reaches_the_wrong_worker_is_answered_by_the_right_one(shop, tmp_path):
    async with two_workers(shop, tmp_path) as (http, urls, services, _):
        for home in (0, 1):
            _, opened = await ask(http, "POST", f"{urls[home]}/v1/episodes", {"task_id": "task-mug", "privileged": True}, **{KEY_HEADER: KEY})
            path = f"/v1/episodes/{opened['episode_id']}"
            for seq, action in enumerate(BUY_MUG, 1):
                answers = [await ask(http, "POST", url + path + "/step", step(seq, action)) for url in (*urls, *urls)]
                assert answers[0][0] == 200 and all(answer == answers[0] for answer in answers)  # executed once, wherever it was asked
            assert answers[0][1]["reward"] == 1.0 and answers[0][1]["reward_detail"]["goal_product_id"] == "zzid-mug"
            assert services[home].counts["steps"] == 3
            for url in urls:
                assert (await ask(http, "POST", url + path + "/step", step(4, BUY_MUG[0])))[1]["error"] == "episode_ended"
                assert (await ask(http, "POST", url + path + "/step", {}))[1]["error"] == "missing_field"
                assert (await ask(http, "GET", url + path))[1]["done"]
            assert (await ask(http, "DELETE", urls[1 - home] + path)) == (200, {})
            assert not services[home].episodes


@pytest.mark.parametrize("episode", ["nope", "7-abc", "0-abc", "1-abc", "1-", "-1-abc", "99999999999-abc", "1-a%2Fb", "1-%20", "%31-abc"])
async def test_ids_that_no_worker_gave_are_unknown_everywhere(shop, tmp_path, episode):
    async with two_workers(shop, tmp_path) as (http, urls, _, _):
        for url in urls:
            status, answer = await ask(http, "GET", f"{url}/v1/episodes/{episode}")
            assert (status, answer["error"]) == (404, "unknown_episode")


async def test_a_full_worker_opens_episodes_where_there_is_room(shop, tmp_path):
    async with two_workers(shop, tmp_path, capacity=2, open_wait_seconds=0.05) as (http, urls, services, _):
        opened = [await ask(http, "POST", urls[0] + "/v1/episodes", {"task_id": "task-mug"}) for _ in range(5)]
        assert [status for status, _ in opened] == [201] * 4 + [503] and opened[4][1]["error"] == "at_capacity"
        assert [answer["episode_id"][:2] for _, answer in opened[:4]] == ["0-", "0-", "1-", "1-"]
        await ask(http, "DELETE", f"{urls[0]}/v1/episodes/{opened[2][1]['episode_id']}")
        assert (await ask(http, "POST", urls[0] + "/v1/episodes", {"task_id": "task-mug"}))[1]["episode_id"].startswith("1-")


async def test_numbers_are_those_of_all_workers(shop, tmp_path):
    async with two_workers(shop, tmp_path) as (http, urls, _, runners):
        for url in (*urls, urls[0]):
            await ask(http, "POST", url + "/v1/episodes", {"task_id": "task-mug"})
        for url in urls:
            health = (await ask(http, "GET", url + "/healthz"))[1]
            assert (health["workers"], health["episodes"]) == (2, 3)
            async with http.get(url + "/metrics") as response:
                assert {"shop_workers 2", "shop_opened_total 3", "shop_episodes_active 3"} <= set((await response.text()).splitlines())
        await runners[1].cleanup()
        assert (await ask(http, "GET", urls[0] + "/healthz"))[1]["workers"] == 1


async def test_a_worker_that_is_gone_is_a_503_which_clients_repeat(shop, tmp_path):
    async with two_workers(shop, tmp_path) as (http, urls, _, runners):
        _, opened = await ask(http, "POST", urls[1] + "/v1/episodes", {"task_id": "task-mug"})
        await runners[1].cleanup()
        async with http.post(f"{urls[0]}/v1/episodes/{opened['episode_id']}/step", json=step(1, BUY_MUG[0])) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert (await response.json())["error"] == "worker_unavailable"


@pytest.mark.parametrize(("num", "capacity", "word"), [(1, 9, "num_workers"), (2000, 9999, "num_workers"), (3, 2, "capacity")])
def test_settings_of_workers_are_checked(shop, num, capacity, word):
    with pytest.raises(InvalidSetting, match=word):
        Workers(shop, num, "127.0.0.1", 0, capacity=capacity)


# ----------------------------------------------------------------------------------------------------- as processes


@contextlib.contextmanager
def launched(world, directory, *flags):
    """The launcher's process and its address."""
    world.save(directory)
    command = [sys.executable, "-m", "launch.serve_env", "--catalogue", str(directory), "--port=0", f"--index_cache={directory}/cache", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, re.search(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.kill()


def wait_until(condition, what):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def shop_everywhere(url, num=12):
    """Plays over a new connection for every request, so that the kernel spreads them over the workers."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def play():
            _, opened = await ask(http, "POST", url + "/v1/episodes", {"task_id": "task-mug"})
            path = f"{url}/v1/episodes/{opened['episode_id']}"
            answers = [await ask(http, "POST", path + "/step", step(seq, action)) for seq, action in enumerate(BUY_MUG, 1)]
            return answers[-1][1]["reward"], (await ask(http, "DELETE", path))[0]

        assert await asyncio.gather(*(play() for _ in range(num))) == [(1.0, 200)] * num
        return (await ask(http, "GET", url + "/healthz"))[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_serve_one_shop_and_stop_cleanly(tmp_path, world, number):
    with launched(world, tmp_path, "--workers=2") as (process, url):
        health = asyncio.run(shop_everywhere(url))
        assert (health["workers"], health["episodes"]) == (2, 0)
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        process.send_signal(number)
        assert process.wait(timeout=60) == 0 and process.stderr.read() == ""
        assert all(is_gone(child.pid) for child in children)


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_outlives_a_parent_that_is_killed(tmp_path, world, workers):
    with launched(world, tmp_path, f"--workers={workers}") as (process, _):
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
        assert len(family) == 1 + (workers if workers > 1 else 0)
        process.kill()
        process.wait(60)
        wait_until(lambda: all(map(is_gone, family)), "a worker outlived its parent")


def test_a_worker_that_dies_is_started_anew(tmp_path, world):
    with launched(world, tmp_path, "--workers=2") as (process, url):
        parent = psutil.Process(process.pid)
        victim, other = parent.children()
        wait_until(lambda: time.time() - victim.create_time() > 6, "time stands still")  # a worker that dies at once stops the service instead
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: len(parent.children()) == 2 and victim not in parent.children(), "no worker took its place")

        async def both_answer():
            async with ShopClient(url) as client:
                await client.tools()
            return (await shop_everywhere(url))["workers"] == 2

        wait_until(lambda: asyncio.run(both_answer()), "the new worker does not answer")
        assert other in parent.children()
        process.terminate()
        assert process.wait(60) == 0
        assert "its episodes are lost" in process.stderr.read()


def test_a_port_that_other_workers_share_is_busy(tmp_path, world):
    with launched(world, tmp_path, "--workers=2") as (_, url):
        for workers in (1, 2):
            command = [
                sys.executable,
                "-m",
                "launch.serve_env",
                "--catalogue",
                str(tmp_path),
                f"--port={url.rsplit(':', 1)[1]}",
                f"--workers={workers}",
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 2 and "is in use" in done.stderr and done.stderr.count("\n") == 1
