"""Lines between processes, over real sockets: what arrives, and what is reported when the other end goes away or falls silent."""

import contextlib
import queue
import socket

import pytest

from intraskill import lines
from intraskill.types import ProcessError

PATIENCE = 60  # for what happens at once unless the machine is busy


class End:
    """One end of a line, and what it was told."""

    def __init__(self, connection: socket.socket, heartbeat: float):
        self.received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.line = lines.Line(connection, heartbeat, self.received.put, self.lost.put)


@pytest.fixture
def sockets():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    yield one, other
    for each in (one, other):
        each.close()


def both_ends(pair):
    ends = [End(each, PATIENCE) for each in pair]
    for end in ends:
        end.line.start()
    return ends


def test_messages_arrive_whole_and_in_order_in_both_directions(sockets):
    one, other = both_ends(sockets)
    sent = [b"", b"a", bytes(range(256)) * 40_000, b"last"]
    for message in sent:
        one.line.send(message)
    other.line.send(b"back")
    assert [other.received.get(timeout=PATIENCE) for _ in sent] == sent
    assert one.received.get(timeout=PATIENCE) == b"back"


def test_a_closed_connection_is_a_death(sockets):
    one = End(sockets[0], PATIENCE)
    one.line.start()
    sockets[1].close()
    assert one.lost.get(timeout=PATIENCE) == "has died: its connection is closed"


def test_silence_for_longer_than_the_heartbeat_is_reported_once(sockets):
    one = End(sockets[0], 0.2)
    one.line.start()  # the other end's socket is open and says nothing, like a process that is stopped
    assert one.lost.get(timeout=PATIENCE) == "has said nothing for 0.2 s"
    with pytest.raises(queue.Empty):
        one.lost.get(timeout=0.5)


def test_an_end_that_has_nothing_to_say_gives_signs_of_life(sockets, monkeypatch):
    monkeypatch.setattr(lines, "_PINGS_PER_HEARTBEAT", 10_000)  # soon, while this end, which says nothing, is still believed to live
    End(sockets[0], PATIENCE).line.start()
    sockets[1].settimeout(PATIENCE)
    seen = b""
    while len(seen) < 3 * 9:
        seen += sockets[1].recv(3 * 9 - len(seen))
    assert seen == bytes(3 * 9), "kind 0 and a length of 0, three times"


def test_an_ended_line_brings_its_last_message_and_no_alarm(sockets):
    one, other = both_ends(sockets)
    one.line.end(b"bye")
    assert other.received.get(timeout=PATIENCE) == b"bye"
    sockets[0].close()
    sockets[1].close()
    with pytest.raises(queue.Empty):
        other.lost.get(timeout=0.3)
    assert one.lost.empty()


def test_a_message_that_nobody_takes_is_a_loss(sockets):
    one = End(sockets[0], 0.3)  # not started: only sending can notice
    one.line.send(bytes(100_000_000))
    assert "takes no messages" in one.lost.get(timeout=PATIENCE)


# ------------------------------------------------------------------------------------------------------------- connecting


def test_only_those_who_know_the_token_are_let_in():
    with lines.open_door("127.0.0.1") as door:
        port = door.getsockname()[1]
        assert door.getsockname()[0] == "127.0.0.1"
        stranger = lines.call("127.0.0.1", port, "wrong", 1, PATIENCE)
        rude = socket.create_connection(("127.0.0.1", port))
        rude.sendall(b"\x00\x05GET /")
        rude.close()
        friends = {n: lines.call("127.0.0.1", port, "token", n, PATIENCE) for n in (2, 1)}
        arrived = lines.let_in(door, "token", 2, PATIENCE)
    assert set(arrived) == {1, 2} and {host for _, host in arrived.values()} == {socket.gethostname()}
    friends[2].sendall(b"x")
    assert arrived[2][0].recv(1) == b"x"
    assert stranger.recv(1) == b"", "the stranger was turned away"
    for each in (stranger, *friends.values(), *(c for c, _ in arrived.values())):
        each.close()


def test_a_stranger_that_says_nothing_does_not_hold_the_door(monkeypatch):
    monkeypatch.setattr(lines, "_HELLO_SECONDS", 0.2)
    with lines.open_door("127.0.0.1") as door, contextlib.ExitStack() as opened:
        port = door.getsockname()[1]
        for _ in range(3):
            opened.callback(socket.create_connection(("127.0.0.1", port)).close)
        opened.callback(lines.call("127.0.0.1", port, "token", 1, PATIENCE).close)
        arrived = lines.let_in(door, "token", 1, PATIENCE)
        assert set(arrived) == {1}
        arrived[1][0].close()


def test_strangers_do_not_put_off_the_end_of_patience(monkeypatch):
    monkeypatch.setattr(lines, "_HELLO_SECONDS", 0.05)
    with lines.open_door("127.0.0.1") as door, contextlib.ExitStack() as opened:
        for _ in range(50):
            opened.callback(socket.create_connection(("127.0.0.1", door.getsockname()[1])).close)
        with pytest.raises(ProcessError, match=r"processes \[1\] have not connected within 0.3 s"):
            lines.let_in(door, "token", 1, 0.3)
        door.settimeout(PATIENCE)
        door.accept()[0].close()  # they are not all let in first


def test_processes_that_do_not_come_are_named():
    with lines.open_door("localhost") as door:
        caller = lines.call("127.0.0.1", door.getsockname()[1], "token", 2, PATIENCE)
        with pytest.raises(ProcessError, match=r"processes \[1, 3\] have not connected within 0.3 s"):
            lines.let_in(door, "token", 3, 0.3)
        caller.close()


def test_a_door_that_is_not_there_is_one_error():
    with lines.open_door("127.0.0.1") as door:
        port = door.getsockname()[1]
    with pytest.raises(ProcessError, match=f"process 0 cannot be reached at 127.0.0.1:{port}"):
        lines.call("127.0.0.1", port, "token", 1, PATIENCE)
