"""redelastic's output on stderr: log lines in torch's format, with level, time and pid first, and plain lines."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import Final, TextIO, cast

PREFIX: Final = "%(level)s%(asctime)s.%(msecs)03d000 %(process)d %(name)s] "
READER_TIMEOUT: Final = 1.0  # for the reader of stderr, before a process exits, in seconds


class LogFormatter(logging.Formatter):
    """``W1124 20:14:54.779000 5522 redelastic.rendezvous.watch] Round 1 …``; each line of a message starts this way."""

    def __init__(self) -> None:
        super().__init__(PREFIX + "%(message)s", "%m%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Format one record, with its traceback if it has one."""
        record.level = record.levelname[:1]
        first, *more = super().format(record).split("\n")
        prefix = first[: first.index("] ") + 2]
        return "\n".join([first, *(prefix + line for line in more)])


def say(text: str) -> None:
    """Write a line to stderr. A full disk there must not hide what the exit code says."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")


def correct_level() -> None:
    """Have ``LOGLEVEL`` name a level of Python's logging: torch takes no other, nor one in lower case."""
    given = os.environ.pop("LOGLEVEL", "").strip()
    name = logging.getLevelName(int(given)) if given.isdecimal() else given.upper()
    if isinstance(logging.getLevelName(name), int):
        os.environ["LOGLEVEL"] = name
    elif given:
        say(f"LOGLEVEL={given!r} is no level of Python's logging: WARNING is used.")
        os.environ["LOGLEVEL"] = "WARNING"


def set_up_logging(logger: logging.Logger) -> None:
    """Write a logger's lines to stderr, if their level is ``LOGLEVEL`` (default: WARNING) or higher.

    If the program has already set up logging, nothing changes.

    Args:
        logger: the root logger in redelastic's own processes, the logger ``redelastic`` in torchrun's.

    Raises:
        ValueError: there is no such level.
    """
    root = logging.getLogger()
    if logger.handlers or root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    if logger is not root:
        handler.addFilter(lambda _: not root.handlers)  # a handler added there later writes these lines too
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("LOGLEVEL", "WARNING").upper())


@contextlib.contextmanager
def only_errors_of(name: str) -> Iterator[None]:
    """Within the block, leave out a logger's lines below the level ERROR."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _BackgroundStream(io.TextIOBase):
    """A stream that never blocks: a thread writes its text to a file, in order, as fast as the file's reader allows."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._ended = False
        self._start_anew()
        os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        self._changed = threading.Condition()  # of what follows; its lock is reentrant, for a signal handler
        self._pending: list[str] = []
        self._writing = self._started = False

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._ended:  # code that has kept this stream may still write
            self._put(text)
            return len(text)
        with self._changed:
            self._pending.append(text)
            self._changed.notify_all()
            if not self._started:
                threading.Thread(target=self._write_pending, name="redelastic-stderr", daemon=True).start()
                self._started = True
        return len(text)

    def end(self, timeout: float) -> None:
        """Wait until all text has been written, or for ``timeout`` seconds."""
        with self._changed:
            self._ended = self._changed.wait_for(lambda: not self._pending and not self._writing, timeout)

    def _write_pending(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pending)
                text, self._pending, self._writing = "".join(self._pending), [], True
            self._put(text)

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide what the exit code says
            rest = text.encode(errors="backslashreplace")
            while rest:
                select.select([], [self._file], [])  # another process may have set it to not block
                rest = rest[os.write(self._file, rest) :]


@contextlib.contextmanager
def unhurried_stderr() -> Iterator[None]:
    """Have writes to ``sys.stderr`` not wait for its reader while the block runs; its end waits a second at most.

    For a process that others wait for: a terminal may be stopped, the reader of a pipe or a disk on the network hang.
    What writes to the file itself, such as C++, still waits. Nothing changes where stderr has been replaced already.
    """
    stderr = sys.__stderr__
    if stderr is None or sys.stderr is not stderr:
        yield
        return
    stderr.flush()
    stream = _BackgroundStream(stderr.fileno())
    sys.stderr = cast("TextIO", stream)
    try:
        yield
    finally:
        sys.stderr = stderr
        stream.end(READER_TIMEOUT)
