"""``redelastic dashboard``: a web page for all runs on one Redis."""

from __future__ import annotations

import argparse
import contextlib
import errno
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from redelastic.redis.routes import is_loopback

from .common import OK, add_server_arguments, endpoint, whole_number

NAME: Final = "dashboard"
SUMMARY: Final = "a live web page for all runs on one Redis"
DESCRIPTION: Final = """\
Serve a live web page for all runs on one Redis: their state, nodes, GPUs,
timelines and events. It needs redelastic[dashboard] here, and nothing on the
nodes.

By default it listens on localhost and admits everyone on this machine. On any
other address it requires the token in --token-file: open the page once as
http://HOST:PORT/?token=TOKEN, or send "Authorization: Bearer TOKEN". It speaks
plain HTTP: on an untrusted network, put TLS in front of it, or use
ssh -L 8370:localhost:8370 HOST.

The page only shows, unless --allow-actions lets whoever has the token have runs
save, drain a node, and close or stop a run. Each request asks for a name and a
reason, and is an event of the run. --link adds addresses elsewhere to each
run's page, such as a Grafana dashboard:

  --link 'Grafana=https://grafana/d/x?var-run={run}&from={start}&to={end}'
  --link 'Logs=https://logs/search?host={host}'

{run} is the run id, {start} and {end} are in ms since 1970; a link with {host}
or {node}, the node's host and id, is shown with each node.

The data is also served as JSON, at most a few seconds old: /api/runs is what
`redelastic list --json` prints, for 1,000 runs at most, and how many it leaves
out (unlisted), /api/runs/RUN what `redelastic status RUN --json`
prints, /api/runs/RUN?logs what `redelastic logs RUN --json` prints.

Exit code: 0 after Ctrl-C or SIGTERM; 2 for wrong arguments, or if it cannot
listen there; 3 if Redis cannot be reached at the start. Later outages are shown
on the page."""

PORT: Final = 8370  # 8265 is Ray's
CALL_TIMEOUT: Final = 2.0  # for a call to Redis, in seconds; then the page says that Redis is away
CONNECT_TIMEOUT: Final = 5.0  # in seconds
SHORTEST_TOKEN: Final = 16  # characters
ABSENT_ERRNOS: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})  # such as for ::1 without IPv6

LINK_FIELDS: Final = frozenset({"run", "start", "end", "host", "node"})  # in the address of a link

Address = tuple[socket.AddressFamily, tuple[Any, ...]]  # the host, and for IPv6 its flow and scope


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--host", default="localhost", help="name or address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=whole_number(0, 65535),
        default=PORT,
        help="port to listen on; 0 for any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="file whose first line is the token; required beyond localhost"
    )
    parser.add_argument(
        "--allow-actions", action="store_true", help="let the page change runs: save, drain, close, stop; needs a token"
    )
    parser.add_argument(
        "--link",
        metavar="NAME=URL",
        type=_link,
        action="append",
        default=[],
        dest="links",
        help="address to show with each run or node; repeatable",
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`.

    Raises:
        ValueError: an argument is wrong, the address cannot be used, or the extra is missing.
    """
    try:
        import starlette  # noqa: F401  # is it installed?
        import uvicorn
    except ImportError:
        raise ValueError("the dashboard needs an extra: pip install 'redelastic[dashboard]'.") from None
    token = None if arguments.token_file is None else _token(arguments.token_file)
    if arguments.allow_actions and token is None:
        raise ValueError("--allow-actions needs --token-file FILE: without a token any program here could end a job.")
    addresses = _resolve(arguments.host)
    if token is None and not all(is_loopback(str(host).partition("%")[0]) for _, (host, *_) in addresses):
        raise ValueError(
            f"--host {arguments.host} is not loopback: give --token-file FILE with a token for the browser."
        )
    from redelastic.dashboard.actions import Actions
    from redelastic.dashboard.app import make_app
    from redelastic.dashboard.connections import LimitedProtocol, backlog
    from redelastic.redis.connection import Connection

    where = endpoint(arguments)
    connection = Connection.open(where, CALL_TIMEOUT, CALL_TIMEOUT, CONNECT_TIMEOUT)
    with contextlib.ExitStack() as opened:
        try:
            listeners = _listen(addresses, arguments.port, opened)
        except OSError as e:
            raise ValueError(
                f"cannot listen on port {arguments.port} of {arguments.host}: {e.strerror}; use another --port."
            ) from e
        actions = Actions(where, arguments.key_prefix) if arguments.allow_actions else None
        config = uvicorn.Config(
            make_app(connection, arguments.key_prefix, token, actions=actions, links=arguments.links),
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # any client on this machine could name another address
            http=LimitedProtocol,
            loop="asyncio",  # its way to accept is the one that the limits are made for
            backlog=backlog(),
            timeout_graceful_shutdown=1,  # its streams never end by themselves
        )
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        sys.stdout.write(
            f"redelastic dashboard for {connection.name}: http://{host}:{listeners[0].getsockname()[1]}/"
            + ("?token=… (from --token-file)" if token else "")
            + "  (Ctrl-C ends it)\n"
        )
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
            uvicorn.Server(config).run(sockets=listeners)
    return OK


def _link(text: str) -> tuple[str, str]:
    name, _, address = text.partition("=")
    if not name.strip() or not address.startswith(("https://", "http://")):
        raise argparse.ArgumentTypeError(f"must be NAME=URL with a URL of http or https, not {text!r}")
    if unknown := set(re.findall(r"\{(.*?)\}", address)) - LINK_FIELDS:
        places = ", ".join(f"{{{place}}}" for place in sorted(LINK_FIELDS))
        raise argparse.ArgumentTypeError(
            f"has {{{min(unknown)}}}, and only {places} are known (%7B and %7D stand for other braces): {text!r}"
        )
    return name.strip(), address


def _token(file: Path) -> str:
    try:
        token = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--token-file {file} cannot be read: {e}.") from e
    if len(token) < SHORTEST_TOKEN:
        raise ValueError(
            f"--token-file {file} has a token of {len(token)} characters; use {SHORTEST_TOKEN} or more: "
            f"openssl rand -hex 32 > {file}"
        )
    return token


def _resolve(host: str) -> list[Address]:
    """The addresses that a name stands for; localhost is both: some browsers use ::1, others 127.0.0.1."""
    if host.lower() == "localhost":
        return [(socket.AF_INET, ("127.0.0.1",)), (socket.AF_INET6, ("::1",))]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise ValueError(f"--host {host} is not an address of this machine: {e.strerror}.") from e
    return [(socket.AddressFamily(family), (address[0], *address[2:])) for family, _, _, _, address in found]


def _listen(addresses: Sequence[Address], port: int, opened: contextlib.ExitStack) -> list[socket.socket]:
    """Listen on one port at each of the addresses that this machine has.

    Raises:
        OSError: it has none of them, or the port is taken at one: its owner would get the dashboard's requests.
    """
    listeners: list[socket.socket] = []
    for family, (host, *rest) in addresses:
        try:
            listener = opened.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((host, port, *rest))
        except OSError as e:
            if e.errno not in ABSENT_ERRNOS or (not listeners and (family, (host, *rest)) == addresses[-1]):
                raise
            continue
        listener.listen()
        port = listener.getsockname()[1]
        listeners.append(listener)
    return listeners
