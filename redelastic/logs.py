"""What we say on stderr: log lines in torch's format, with level, time and pid first; and last words."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Final

PREFIX: Final = "%(level)s%(asctime)s.%(msecs)03d000 %(process)d %(name)s] "


class LogFormatter(logging.Formatter):
    """``W1124 20:14:54.779000 5522 redelastic.rendezvous.view] Round 1 …``; each line of a message starts this way."""

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


def set_up_logging(logger: logging.Logger) -> None:
    """Write a logger's lines to stderr, if their level is ``LOGLEVEL`` (default: WARNING) or higher.

    If the program has already set up logging, nothing changes.

    Args:
        logger: the root logger in our own processes, ``redelastic``'s in torchrun's.

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
