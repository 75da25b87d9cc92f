"""The commands' shared parts: how they find Redis, and how they report errors."""

from __future__ import annotations

import argparse
import difflib
import re
import signal
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NoReturn

from redelastic.redis.keys import DEFAULT_PREFIX, RunKeys

if TYPE_CHECKING:  # importing them imports redis-py, which takes 0.1 s: not for --help, or a bad run id
    from redelastic.monitoring.operator import Run
    from redelastic.redis.connection import Connection
    from redelastic.redis.endpoint import Endpoint

OK: Final = 0
NO: Final = 1  # the answer is no: something is wrong
USAGE: Final = 2  # argparse's own
UNREACHABLE: Final = 3  # Redis does not answer, or refuses this client
UNKNOWN: Final = 4  # no such run or node
UNMEASURED: Final = 5  # something could not be measured

COMMAND_TIMEOUT: Final = 120.0  # for all of a command that does not wait for anything, in seconds


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and suggest what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and exit with 2."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        meant = suggestion(unknown[1], self._option_string_actions) if unknown else ""
        self.exit(USAGE, f"{self.prog}: {message}{meant} (see {self.prog} --help)\n")


def suggestion(word: str, known: Iterable[str]) -> str:
    """A question asking whether another word was meant; empty if none is similar."""
    alike = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {alike[0]}?" if alike else ""


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number in these bounds."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high:,}, not {text!r}")
        return int(text)

    return parse


def node_counts(nnodes: str) -> tuple[int, int]:
    """The fewest and the most nodes that ``--nnodes`` allows.

    Raises:
        ValueError: it is no such text.
    """
    least, _, most = nnodes.partition(":")
    if not (re.fullmatch(r"[0-9]+(:[0-9]+)?", nnodes) and 1 <= int(least) <= int(most or least)):
        raise ValueError(f"--nnodes={nnodes} is invalid: use N (4) or MIN:MAX (2:4)")
    return int(least), int(most or least)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where Redis is."""
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        default="",
        help="host:port or URL of Redis, like --rdzv-endpoint (default: $REDELASTIC_REDIS_URL, or localhost)",
    )
    for option, what in (("--ca-cert", "CA"), ("--ssl-cert", "client certificate"), ("--ssl-cert-key", "client key")):
        parser.add_argument(option, metavar="FILE", help=f"{what} file for TLS (rediss://)")
    parser.add_argument(
        "--key-prefix",
        metavar="PREFIX",
        default=DEFAULT_PREFIX,
        help="key_prefix of the run's --rdzv-conf (default: redelastic)",
    )


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the run."""
    parser.add_argument("run", metavar="RUN", help="run id, as given to --rdzv-id")


def endpoint(arguments: argparse.Namespace) -> Endpoint:
    """The Redis that the arguments name."""
    from redelastic.redis.endpoint import parse_endpoint

    tls = {name: getattr(arguments, name) for name in ("ca_cert", "ssl_cert", "ssl_cert_key")}
    return parse_endpoint(arguments.endpoint, **tls)


def open_connection(arguments: argparse.Namespace) -> Connection:
    """Connect to the Redis that the arguments name."""
    from redelastic.monitoring.operator import open_connection

    return open_connection(_endpoint_within_time(arguments))


def open_run(arguments: argparse.Namespace) -> Run:
    """Connect, and open the run that the arguments name."""
    RunKeys(arguments.run, arguments.key_prefix)  # before any call: a bad id is reported at once
    from redelastic.monitoring.operator import Run

    return Run(_endpoint_within_time(arguments), arguments.run, key_prefix=arguments.key_prefix)


def _endpoint_within_time(arguments: argparse.Namespace) -> Endpoint:
    """As :func:`endpoint`; ends the command after a while.

    A call goes on as long as some of its reply gets through, be it byte by byte. Commands that wait for something are
    not ended.
    """
    from redelastic.redis.errors import UnreachableError

    where = endpoint(arguments)

    def give_up(*_: object) -> None:
        raise UnreachableError(f"Redis at {where} has not answered in full within {COMMAND_TIMEOUT:g} s.")

    waits = any(getattr(arguments, name, False) for name in ("follow", "watch", "wait"))
    if not waits and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, COMMAND_TIMEOUT)
    return where


def end_time_limit() -> None:
    """Stop the clock that :func:`open_connection` or :func:`open_run` has started, if one has."""
    signal.setitimer(signal.ITIMER_REAL, 0)
