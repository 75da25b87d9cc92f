"""A server that is not Redis, or wants harm: a command says so in one line, and ends."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from redelastic.cli import common
from tests.support.commands import run_command

pytest_plugins = ["tests.support.cli_fixtures"]
SHAPES = {
    "word": b"+OK\r\n",
    "number": b":1\r\n",
    "nothing": b"$-1\r\n",
    "empty": b"*0\r\n",
    "nested": b"*1\r\n*1\r\n*0\r\n",
    "odd": b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n",
    "numbers": b"*7\r\n:1\r\n:2\r\n:3\r\n:4\r\n:5\r\n:6\r\n:7\r\n",
    "lists": b"*7\r\n*1\r\n:1\r\n*1\r\n:1\r\n*1\r\n:1\r\n*1\r\n:1\r\n*1\r\n:1\r\n*1\r\n:1\r\n*1\r\n:1\r\n",
    "map": b"%1\r\n+a\r\n+b\r\n",
    "true": b"#t\r\n",
    "error": b"-\x1b[2J\r\n",
    "noise": b"\x00\xff\x1b[2J\r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


def test_a_server_that_never_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte at a time keeps a call alive, and an array of two billion parts is not there yet."""
    monkeypatch.setattr(common, "COMMAND_TIMEOUT", 2.0)

    def drip(server: socket.socket, beginning: bytes) -> None:
        with contextlib.suppress(OSError):
            client, _ = server.accept()
            with client:
                client.sendall(beginning)
                while not over.wait(0.1):
                    client.sendall(b"x")

    for beginning in (b"+", b"*2000000000\r\n+", b"$2000000000\r\n"):
        over = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=drip, args=(server, beginning))
            thread.start()
            done = run_command("status", "r", "--endpoint", f"127.0.0.1:{server.getsockname()[1]}")
            over.set()
            server.shutdown(socket.SHUT_RDWR)  # ends the wait for a command that gave up before it connected
            thread.join()
        assert (done.code, done.err.count("\n")) == (3, 1), done.err


class Handler(socketserver.StreamRequestHandler):
    """Answers each command that it reads with the same bytes, but PING as Redis does."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            self.wfile.write(b"+PONG\r\n" if words[0].upper() == b"PING" else self.server.answer)  # type: ignore[attr-defined]

    def _word(self) -> bytes:
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:-2]


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, *_: object) -> None:
        """The command has hung up."""


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with Server(request.param) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.fault("a server that answers in wrong shapes", "a command ends with one line")
@pytest.mark.parametrize("url", SHAPES.values(), ids=SHAPES, indirect=True)
def test_answers_of_a_wrong_shape(url: str) -> None:
    for argv in (
        *(("status", "r"), ("status", "r", "--json"), ("events", "r"), ("logs", "r"), ("timeline", "r", "--json")),
        *(("list",), ("drain", "r", "a"), ("close", "r"), ("readmit", "r", "a")),
    ):
        done = run_command(*argv, "--endpoint", url)
        assert "Traceback" not in done.err, argv
        assert done.err.count("\n") == (1 if done.code else 0), (argv, done.err)
        assert not set(done.out + done.err) & set("\x1b\x00"), argv
