"""Lines between process 0 and the other processes of a run: messages, and the certainty that the other end is alive.

A collective whose partner has died may wait for ever, and the thread that waits in it runs no Python. So each end of a line has a thread of its own
that listens. The kernel closes the connection of a killed process at once; a process that hangs, or whose host is gone, says nothing for longer
than the heartbeat allows. Either way `lost` is called, in that thread.

Whoever connects has to know a token that travels by another way; nothing that arrives is ever unpickled.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable

from intraskill.types import ProcessError

_HEAD = struct.Struct(">BQ")  # kind, number of bytes that follow
_PING, _MESSAGE, _END = range(3)
_PINGS_PER_HEARTBEAT = 4
_LONGEST_HELLO = 1 << 10
_HELLO_SECONDS = 10.0  # it is said at once


class Line:
    """One connection. `send` and `end` may be called from any thread.

    Args:
      connection: connected; this object owns it.
      heartbeat_seconds: how long the other end may say nothing.
      received: is given each message, in the listening thread.
      lost: is told why nothing more will come, unless one of the two ends has ended the line.
    """

    def __init__(self, connection: socket.socket, heartbeat_seconds: float, received: Callable[[bytes], None], lost: Callable[[str], None]):
        self._connection, self._heartbeat = connection, heartbeat_seconds
        self._received, self._lost = received, lost
        self._sending, self._over = threading.Lock(), threading.Event()
        connection.settimeout(heartbeat_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        self._listener = threading.Thread(target=self._listen, name="line-listen", daemon=True)

    def start(self) -> None:
        """Begins to listen and to give signs of life."""
        self._listener.start()
        threading.Thread(target=self._ping, name="line-ping", daemon=True).start()

    def wait_until_gone(self, seconds: float) -> None:
        """Returns when the other end has gone, or time is up. Not for the listening thread itself."""
        if threading.current_thread() is not self._listener:
            self._listener.join(seconds)

    def send(self, message: bytes) -> None:
        """Sends a message; where the other end takes none, `lost` is called."""
        try:
            self._write(_MESSAGE, message)
        except OSError as error:
            self._report(f"takes no messages ({error})")

    def end(self, last: bytes | None = None) -> None:
        """Ends the line, with a last message where one is given. What follows from the other end is not a loss."""
        self._over.set()
        try:
            if last is not None:
                self._write(_END, last)
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone already

    def _write(self, kind: int, body: bytes) -> None:
        with self._sending:
            self._connection.sendall(_HEAD.pack(kind, len(body)))
            self._connection.sendall(body)

    def _ping(self) -> None:
        while not self._over.wait(self._heartbeat / _PINGS_PER_HEARTBEAT):
            try:
                self._write(_PING, b"")
            except OSError as error:
                self._report(f"takes no messages ({error})")

    def _listen(self) -> None:
        try:
            while True:
                kind, size = _HEAD.unpack(_read(self._connection, _HEAD.size))
                body = _read(self._connection, size)
                if kind == _END:
                    self._over.set()
                    self._received(body)
                    return
                if kind == _MESSAGE:
                    self._received(body)
        except TimeoutError:
            self._report(f"has said nothing for {self._heartbeat:g} s")
        except (OSError, EOFError):
            self._report("has died: its connection is closed")

    def _report(self, why: str) -> None:
        if not self._over.is_set():
            self._over.set()
            self._lost(why)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError
        done += count
    return bytes(data)


def open_door(host: str) -> socket.socket:
    """A socket that listens on a free port: of the loopback interface where `host` names that, else of all interfaces."""
    if host == "localhost" or host.startswith("127."):
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def let_in(door: socket.socket, token: str, count: int, seconds: float) -> dict[int, tuple[socket.socket, str]]:
    """Waits for `count` processes that know the token; their connections and host names by process id. Raises ProcessError when time is up."""
    end = time.monotonic() + seconds
    arrived: dict[int, tuple[socket.socket, str]] = {}
    while len(arrived) < count:
        try:
            left = end - time.monotonic()
            if left <= 0:  # `accept` would go on as long as somebody waits
                raise TimeoutError
            door.settimeout(left)
            connection, _ = door.accept()
        except TimeoutError:
            missing = sorted(set(range(1, count + 1)) - set(arrived))
            raise ProcessError(f"processes {missing} have not connected within {seconds:g} s: look at their logs") from None
        connection.settimeout(min(seconds, _HELLO_SECONDS))  # who says nothing keeps the others waiting no longer than this
        try:
            (size,) = struct.unpack(">H", _read(connection, 2))
            said, number, host = _read(connection, min(size, _LONGEST_HELLO)).decode().split("\n")
            if said != token:
                raise ValueError("another token")
            arrived[int(number)] = (connection, host)
        except (OSError, EOFError, ValueError):  # not one of ours
            connection.close()
    return arrived


def call(host: str, port: int, token: str, number: int, seconds: float) -> socket.socket:
    """Connects process `number` to the door that listens at `host`. Raises ProcessError."""
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
        hello = f"{token}\n{number}\n{socket.gethostname()}".encode()
        connection.sendall(struct.pack(">H", len(hello)) + hello)
    except OSError as error:
        raise ProcessError(f"process 0 cannot be reached at {host}:{port} ({error}): open that port range between the hosts of the job") from error
    return connection
