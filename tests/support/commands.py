"""Runs the commands: in this process or as a user would, on runs whose nodes are in this process."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redelastic.cli
from tests.support.waiting import Within

if TYPE_CHECKING:  # unneeded imports of a command only show if this module does not make them
    from redelastic.rendezvous.handler import RedisRendezvousHandler
    from redelastic.rendezvous.node import Node
until = Within(60)


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Done]  # what the fixture `cli` of `cli_fixtures.py` is


def command(*argv: str) -> Done:
    """Run a command in this process, with its output in pipes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = redelastic.cli.main(argv)
        except SystemExit as e:
            code = int(e.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def form(pool: ThreadPoolExecutor, *nodes: RedisRendezvousHandler) -> None:
    """Have nodes form a round."""
    for future in [pool.submit(node.next_rendezvous) for node in nodes]:
        future.result(60)


class Started:
    """A command that runs in its own process.

    Args:
        argv: its arguments.
        columns: width of its terminal; None for pipes.
    """

    def __init__(self, *argv: str, columns: int | None = None) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}}
        theirs = write = -1
        if columns is None:
            theirs, write = os.pipe()
        else:
            theirs, write = pty.openpty()
            fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._error_end, error_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "redelastic", *argv],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=error_end,
            env=environment | {"TERM": "xterm-256color"},
        )
        os.close(write)
        os.close(error_end)
        self._texts = {theirs: "", self._error_end: ""}
        self._out_end = theirs
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        open_ends = set(self._texts)
        decoders = {end: codecs.getincrementaldecoder("utf-8")("replace") for end in open_ends}  # for parts of a sign
        while open_ends:
            for end in select.select(list(open_ends), [], [])[0]:
                try:
                    data = os.read(end, 65536)
                except OSError:  # a terminal whose other end is closed
                    data = b""
                self._texts[end] += decoders[end].decode(data)
                if not data:
                    open_ends.discard(end)
                    os.close(end)

    @property
    def out(self) -> str:
        return self._texts[self._out_end]

    @property
    def err(self) -> str:
        return self._texts[self._error_end]

    def until(self, text: str, *, err: bool = False, after: int = 0) -> None:
        """Wait until it has written ``text``, at or after this character position."""
        until(lambda: text in (self.err if err else self.out)[after:] or self.process.poll() is not None, text)
        if text not in (self.err if err else self.out)[after:]:
            self._reader.join(60)  # it has ended, and its last words may still be in the pipe
        assert text in (self.err if err else self.out)[after:], f"it ended, with {self.out}\n{self.err}"

    def interrupt(self) -> int:
        """Do what Ctrl-C does; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(60)
        self._reader.join(60)
        return code


@contextlib.contextmanager
def started(*argv: str, columns: int | None = None) -> Iterator[Started]:
    """Start a command, and kill it at the end if it has not ended."""
    process = Started(*argv, columns=columns)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def with_agent(node: RedisRendezvousHandler) -> RedisRendezvousHandler:
    node.node.describe = lambda base: json.dumps(base | {"agent": "redelastic"})
    return node


def rank_of(member: Node) -> int:
    entered = member.view.round
    assert entered is not None
    return entered.rank
