"""The format of our log lines: torch's, with level, time and pid first."""

from __future__ import annotations

import logging
import os
from typing import Final

PREFIX: Final = "%(level)s%(asctime)s.%(msecs)03d000 %(process)d %(name)s] "


class LogFormatter(logging.Formatter):
    """``W1124 20:14:54.779000 5522 redelastic.rendezvous.view] Round 1 …``; each line of a message begins so."""

    def __init__(self) -> None:
        super().__init__(PREFIX + "%(message)s", "%m%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """One record, with its traceback if it has one."""
        record.level = record.levelname[:1]
        first, *more = super().format(record).split("\n")
        prefix = first[: first.index("] ") + 2]
        return "\n".join([first, *(prefix + line for line in more)])


def set_up_logging(logger: logging.Logger) -> None:
    """Have a logger's lines written to stderr, from the level that ``LOGLEVEL`` names or WARNING on.

    If the program has already set up logging, nothing changes.

    Args:
        logger: the root logger in a process of our own, ``redelastic``'s in one that is torchrun's.

    Raises:
        ValueError: there is no such level.
    """
    root = logging.getLogger()
    if logger.handlers or root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    if logger is not root:
        handler.addFilter(lambda _: not root.handlers)  # one that is set up later writes these lines as well
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("LOGLEVEL", "WARNING").upper())
