"""``redelastic server``: a private Redis in the foreground, for trying things out or for tests."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from redelastic.logs import say
from redelastic.signals import handling

from .common import NO, OK, whole_number

if TYPE_CHECKING:
    from redelastic.redis.server import RedisServer

NAME = "server"
SUMMARY = "run a private Redis for tests on this host, until Ctrl-C"
DESCRIPTION = """\
Run a private redis-server in the foreground, until Ctrl-C or SIGTERM.

It is not a production server: it listens on this host only, with a random
password, keeps everything in memory unless --data-dir is given, has no replica,
and ends with this command, even on SIGKILL.

The first line of the output is for the shell that uses the server:

  export REDELASTIC_REDIS_URL='redis://:PASSWORD@127.0.0.1:PORT/0'

With --url-file the URL goes to a file that only you can read, and no secret is
printed: REDELASTIC_REDIS_URL="$(cat FILE)" redelastic doctor

--json prints one line instead, an object with the fields endpoint, pid (of
redis-server), and url or url_file. The exit code is 0 after Ctrl-C or SIGTERM,
1 if the server could not start or exited by itself."""


POLL_S: Final = 0.2
_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last when the terminal is closed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--port",
        type=whole_number(1, 65535),
        default=0,
        metavar="N",
        help="TCP port on 127.0.0.1 (default: a free one)",
    )
    place.add_argument("--unix-socket", action="store_true", help="listen on a Unix socket instead of a port")
    parser.add_argument("--data-dir", metavar="DIR", help="keep the data in this directory")
    parser.add_argument("--url-file", metavar="FILE", type=Path, help="write the URL to this file, and print no secret")
    parser.add_argument("--json", action="store_true", help="print the URL as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the server; see :data:`DESCRIPTION`.

    Returns:
        0 after Ctrl-C or SIGTERM; 1 if the server could not be started, or ended on its own.
    """
    from redelastic.redis.server import RedisServer

    file: Path | None = arguments.url_file
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ValueError(f"--url-file {file} is a directory, or its directory does not exist: name a file.")
    stop, place = threading.Event(), {"port": arguments.port, "unix_socket": arguments.unix_socket}
    with handling(_ENDINGS, lambda *_: stop.set()):  # from before the server starts until it is gone
        try:
            with RedisServer(data_dir=arguments.data_dir, **place) as server, _announced(server, arguments):
                while not stop.wait(POLL_S):
                    if server.pid is None:
                        _say("redis-server exited by itself.")
                        return NO
        except (OSError, RuntimeError) as e:
            _say(str(e))
            return NO
    _say("stopped.")
    return OK


@contextlib.contextmanager
def _announced(server: RedisServer, arguments: argparse.Namespace) -> Iterator[None]:
    """Say where the server is; remove the file with the URL at the end."""
    file: Path | None = arguments.url_file
    if file is not None:
        _write_secret(file, f"{server.url}\n")
    try:
        if arguments.json:
            where = {"url": server.url} if file is None else {"url_file": str(file)}
            sys.stdout.write(json.dumps({"endpoint": server.endpoint, "pid": server.pid, **where}) + "\n")
        elif file is None:
            sys.stdout.write(f"export REDELASTIC_REDIS_URL='{server.url}'\n")
        sys.stdout.flush()
        kept = "in memory only" if arguments.data_dir is None else f"data in {arguments.data_dir}"
        _say(f"Redis is at {server.endpoint}, process {server.pid}; Ctrl-C ends it.")
        _say(f"For tests: this host only, no replica, {kept}.")
        yield
    finally:
        if file is not None:
            file.unlink(missing_ok=True)


def _write_secret(file: Path, secret: str) -> None:
    """Write a file that only its owner can read from the first byte on; an existing one is replaced."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(secret)
    draft.replace(file)


def _say(what: str) -> None:
    say(f"redelastic server: {what}")
