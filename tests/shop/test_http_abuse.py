"""What clients may do to the service by mistake or on purpose: typed 4xx answers, never a 500, nothing executed twice, nothing left behind."""

import asyncio
import collections
import gc
import http.client
import json
import socket
import struct
from urllib.parse import quote, urlsplit

import aiohttp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shop_env.server import FORWARDED, KEY_HEADER, ServerThread

from .conftest import KEY

ERRORS = {
    400: {"bad_json", "bad_field", "unknown_field", "missing_field"},
    403: {"not_privileged"},
    404: {"unknown_route", "unknown_episode", "unknown_task", "unknown_product", "unknown_split"},
    405: {"method_not_allowed"},
    409: {"sequence_gap", "sequence_conflict"},
    410: {"episode_ended"},
    413: {"body_too_large"},
}
SECRETS = ("zz secret", "zz full", "zz user", "31.41")


class Clock:
    """Time as the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def server(shop):
    with ServerThread(shop, privileged_key=KEY, max_body_bytes=4096, capacity=10**6) as running:
        yield running


def connect(server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)


def ask(connection, method, path, body=b"", headers=None):
    connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers or {})
    response = connection.getresponse()
    return response.status, response.read()


def open_episode(connection, task="task-jacket"):
    status, answer = ask(connection, "POST", "/v1/episodes", {"task_id": task})
    assert status == 201
    return f"/v1/episodes/{json.loads(answer)['episode_id']}"


# ------------------------------------------------------------------------------------------------------------------ fuzz

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3), max_leaves=8)
words = st.sampled_from(["search", "click", "query", "target", "mug", "A", "buy now", "red", "large", "task-mug", "zzid-03", "train"])
step_bodies = st.fixed_dictionaries(
    {"seq": st.integers(-1, 4) | values, "tool": st.sampled_from(["search", "click"]) | values},
    optional={"arguments": st.dictionaries(words, words | values, max_size=2) | values, "extra": values},
)
open_bodies = st.fixed_dictionaries({}, optional={"task_id": words | values, "task": values, "privileged": values, "more": values})
bodies = (step_bodies | open_bodies | values).map(lambda v: json.dumps(v).encode()) | st.binary(max_size=40)
segments = words | st.text(max_size=12)
paths = st.one_of(
    st.just("{episode}/step"),
    st.just("{episode}"),
    st.just("/v1/episodes"),
    segments.map(lambda s: f"/v1/episodes/{quote(s, safe='')}/step"),
    st.tuples(st.sampled_from(["/v1/episodes/", "/v1/tasks/", "/v1/products/", "/v1/tasks?split=", "/"]), segments).map(
        lambda p: p[0] + quote(p[1], safe="")
    ),
)
requests = st.tuples(st.sampled_from(["POST", "POST", "POST", "GET", "DELETE", "PUT", "PATCH"]), paths, bodies, st.booleans())


def check_answer(status, answer):
    value = json.loads(answer)
    if status >= 400:
        assert status in ERRORS and value["error"] in ERRORS[status] and value["message"], (status, value)
    else:
        assert status in (200, 201)
    return value


@settings(max_examples=100, deadline=None)
@given(st.lists(requests, min_size=1, max_size=5))
@example([("POST", "{episode}/step", b'{"seq":1,"tool":"search","arguments":{"query":1e999}}', False), ("GET", "{episode}", b"", False)])
@example(
    [
        ("POST", "{episode}/step", b'{"seq":1,"tool":"search","arguments":{"query":' + b"[" * 900 + b"]" * 900 + b"}}", False),
        ("GET", "{episode}", b"", False),
    ]
)
@example(
    [("POST", "{episode}/step", b'{"seq":1,"tool":"search","arguments":{"query":' + b"9" * 4000 + b"}}", False), ("GET", "{episode}", b"", False)]
)
@example([("POST", "{episode}/step", b'{"seq":1,"tool":"\\ud800","arguments":{"\\ud800":"\\udfff"}}', False), ("GET", "{episode}", b"", False)])
def test_any_requests_are_answered_with_json_and_a_type(server, sequence):
    connection = connect(server)
    episode = open_episode(connection)
    try:
        for method, path, body, knows_key in sequence:
            target = path.replace("{episode}", episode)
            if target in ("/metrics", "/play", "/play.js", "/play.css"):
                continue  # not JSON on purpose
            # The key is wrong: a client without it must learn nothing.
            status, answer = ask(connection, method, target, body, {KEY_HEADER: "guess", FORWARDED: "1"} if knows_key else {})
            value = check_answer(status, answer)
            if not value.get("done"):
                assert not any(secret in answer.decode() for secret in SECRETS)
    finally:
        assert ask(connection, "DELETE", episode)[0] in (200, 404)  # 404: the fuzz closed it itself
        connection.close()


tasks = st.fixed_dictionaries(
    {},
    optional={
        "id": words | values,
        "instruction": words | values,
        "full_instruction": words | values,
        "persona": st.dictionaries(st.text(max_size=3), values, max_size=2) | values,
        "user_id": words | values,
        "goal": st.fixed_dictionaries(
            {"product_id": st.just("zzid-mug") | values, "attributes": st.lists(words | values, max_size=2) | values},
            optional={"options": st.dictionaries(words, words | values, max_size=2) | values, "price_ceiling": leaves},
        )
        | values,
    },
)
GOAL = {"product_id": "zzid-mug", "attributes": ["ceramic"], "options": {}, "price_ceiling": None}
TASK = {"id": "own", "instruction": "a mug", "full_instruction": "a ceramic mug", "persona": {}, "goal": GOAL}


@settings(max_examples=100, deadline=None)
@given(tasks.map(lambda task: TASK | task))
@example(TASK | {"goal": GOAL | {"attributes": [3]}})
@example(TASK | {"goal": GOAL | {"options": {"colour": None}}})
@example(TASK | {"goal": GOAL | {"options": []}})
@example(TASK | {"goal": GOAL | {"price_ceiling": True}})
@example(TASK | {"persona": [["a", 1]]})
def test_any_task_that_is_brought_along_is_played_to_its_end_or_refused(server, task):
    connection = connect(server)
    status, answer = ask(connection, "POST", "/v1/episodes", {"task": task, "privileged": True}, {KEY_HEADER: KEY})
    value = check_answer(status, answer)
    if status == 201:
        path = f"/v1/episodes/{value['episode_id']}"
        for seq, (tool, arguments) in enumerate([("search", {"query": "ceramic"}), ("click", {"target": "A"}), ("click", {"target": "buy now"})], 1):
            status, answer = ask(connection, "POST", path + "/step", {"seq": seq, "tool": tool, "arguments": arguments})
            assert status == 200, answer
        assert json.loads(answer)["done"] and 0 <= json.loads(answer)["reward"] <= 1
        assert ask(connection, "DELETE", path)[0] == 200
    connection.close()


@pytest.mark.parametrize("length", [4097, 10**6, 5 * 10**7])
def test_huge_bodies_are_refused(server, length):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.settimeout(60)
        connection.sendall(f"POST /v1/episodes HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
        try:
            for sent in range(0, min(length, 10**6), 4096):
                connection.sendall(b" " * min(4096, length - sent))
        except ConnectionError:
            pass  # it need not read to the end
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert not any("internal" in name for name in server.service.counts)


# -------------------------------------------------------------------------------------- two clients, killed clients


def test_of_two_clients_at_once_one_acts(server):
    async def run(queries):
        connection = connect(server)
        path = open_episode(connection)
        connection.close()
        async with aiohttp.ClientSession() as http:

            async def one(query):
                async with http.post(f"{server.url}{path}/step", json={"seq": 1, "tool": "search", "arguments": {"query": query}}) as response:
                    return response.status, await response.text()

            answers = await asyncio.gather(*map(one, queries))
        return answers, server.service.episodes[path.rsplit("/", 1)[1]].session.steps

    answers, steps = asyncio.run(run([f"mug {i}" for i in range(12)]))
    assert collections.Counter(status for status, _ in answers) == {200: 1, 409: 11} and steps == 1
    assert all(json.loads(text)["error"] == "sequence_conflict" for status, text in answers if status == 409)
    answers, steps = asyncio.run(run(["mug"] * 12))
    assert {status for status, _ in answers} == {200} and len(set(answers)) == 1 and steps == 1


def test_a_client_that_is_killed_in_a_step_can_be_replaced(server):
    connection = connect(server)
    path = open_episode(connection)
    body = json.dumps({"seq": 1, "tool": "search", "arguments": {"query": "mug"}}).encode()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as killed:
            killed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes as the kernel does for a process that was killed
            killed.sendall(f"POST {path}/step HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    status, answer = ask(connection, "POST", path + "/step", body)
    assert status == 200 and json.loads(answer)["seq"] == 1
    assert server.service.episodes[path.rsplit("/", 1)[1]].session.steps == 1
    assert ask(connection, "DELETE", path)[0] == 200


# ------------------------------------------------------------------------------------------------------------ leaks


def abandon(port: int, num: int) -> None:
    """Opens episodes over one connection without waiting for answers, takes a step in the first, and goes."""
    request = b'POST /v1/episodes HTTP/1.1\r\nHost: x\r\nContent-Length: 22\r\n\r\n{"task_id":"task-mug"}'
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(120)
        connection.sendall(request * num)
        received = b""
        while received.count(b'"episode_id"') < num:
            part = connection.recv(1 << 20)
            assert part, received[-300:]
            received += part
    assert received.count(b"HTTP/1.1 201 ") == num


@pytest.mark.timeout(900)  # 10,000 requests: seconds, but not on a machine that is busy with something else
def test_ten_thousand_abandoned_episodes_leave_nothing(shop):
    clock, waves, size = Clock(), 20, 500
    with ServerThread(shop, clock=clock, lease_seconds=60, capacity=size + 1, open_wait_seconds=0) as server:
        port = int(server.url.rsplit(":", 1)[1])
        connection = connect(server)
        path = open_episode(connection)
        sizes = []
        for _ in range(waves):
            abandon(port, size)  # the shop is full: the next episode finds room only because these expire, then or in the sweep before
            clock.now += 61
            path = open_episode(connection)
            assert len(server.service.episodes) == 1
            gc.collect()
            sizes.append(len(gc.get_objects()))
        assert server.service.counts["opened"] == waves * (size + 1) + 1 and server.service.counts["expired"] == waves * (size + 1)
        # What 18 further waves left would be 9,000 sessions with some objects each.
        assert sizes[-1] - sizes[1] < 2000, sizes
        clock.now += 61
        assert ask(connection, "GET", path)[0] == 404
        assert not server.service.episodes and server.service._room._value == size + 1
        connection.close()


def test_finished_episodes_that_nobody_closes_are_bounded(shop):
    with ServerThread(shop, capacity=3) as server:
        connection = connect(server)
        opened = []
        for _ in range(8):
            opened.append(path := open_episode(connection, "task-mug"))
            for seq, (tool, name, argument) in enumerate(
                [("search", "query", "ceramic"), ("click", "target", "A"), ("click", "target", "buy now")], 1
            ):
                assert ask(connection, "POST", path + "/step", {"seq": seq, "tool": tool, "arguments": {name: argument}})[0] == 200
        assert [ask(connection, "GET", path)[0] for path in opened] == [404] * 5 + [200] * 3
        assert server.service._room._value == 3
        assert [ask(connection, "DELETE", path)[0] for path in opened[5:]] == [200] * 3 and not server.service.episodes
        assert server.service._room._value == 3
        connection.close()
