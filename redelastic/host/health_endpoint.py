"""A node's HTTP endpoint for a supervisor: ``/livez``, ``/readyz`` and ``/metrics``.

No client, however slow, may disturb the agent: each gets a daemon thread and little time, and not many are served at
once. Nor may it keep out a supervisor, which would end the node: the oldest client that has not asked yet makes room
for a new one, and the clients of one address never take all the room. Nothing is registered with Prometheus's global
registry, which belongs to the user.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from redelastic.redis.routes import host_and_port, is_loopback, names_loopback

log = logging.getLogger(__name__)

REQUEST_TIMEOUT: Final = 1.0  # for a client to send its request, in seconds
CLIENT_TIMEOUT: Final = 10.0  # for a client to send a request and to read the answer, in seconds
MAX_CLIENTS: Final = 64  # at once; the endpoint hangs up on others
MAX_OF_ADDRESS: Final = 16  # at once, of one address
POLL_INTERVAL: Final = 0.2  # how soon the server notices that it must stop, in seconds
STATES: Final = ("waiting", "running", "parked", "draining", "barred", "refused")
PLAIN_TEXT: Final = "text/plain; charset=utf-8"


class NodeView(Protocol):
    """The agent as the endpoint sees it; called from the endpoint's threads."""

    def stalled(self) -> str:
        """Why the agent's loop counts as dead; empty while it is alive."""

    def unready(self) -> str:
        """Why no workers run in a round; empty while they do."""

    def status(self) -> Mapping[str, Any]:
        """The node's status, as its heartbeat reports it to Redis; any field may be missing."""


class HealthEndpoint:
    """Serves a node's health and metrics until it is stopped.

    Args:
        node: whose health and metrics to serve.
        host: address or name to listen on, IPv6 included; default: loopback.
        port: port to listen on; 0: any free one.

    Attributes:
        port: that it listens on; before it has started, the port it was given.

    Raises:
        ValueError: there is no such port.
    """

    def __init__(self, node: NodeView, *, host: str = "127.0.0.1", port: int) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"The health endpoint cannot listen on port {port}: use 1 to 65535, or 0 for any.")
        self._node, self._host, self.port = node, host, port
        self._server: _Server | None = None

    def start(self) -> None:
        """Start listening and serving.

        Raises:
            OSError: it cannot listen there.
        """
        try:
            family, *_, address = socket.getaddrinfo(
                self._host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            server = _Server(family, address, self._node)
        except OSError as e:
            raise OSError(
                f"The health endpoint cannot listen on port {self.port} of {self._host}: {e.strerror or e}; "
                f"{_advice(e)}."
            ) from e
        self._server, self.port = server, server.server_address[1]
        threading.Thread(
            target=server.serve_forever, args=(POLL_INTERVAL,), name="redelastic-health-endpoint", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop listening and hang up on all clients; it may be called twice, or before :meth:`start`."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            server.hang_up()


def _advice(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "use an address of this machine"
    if error.errno == errno.EACCES:
        return "use a port above 1023"
    return "end the process that uses it, or use another port (each agent on a machine needs its own)"


# -- the server


@dataclass
class _Client:
    """A client that is connected.

    Attributes:
        address: of its host.
        connected_at: when it connected, on the monotonic clock.
        has_asked: whether it has sent its request.
    """

    address: str
    connected_at: float
    has_asked: bool = False

    def is_overdue(self, at: float) -> bool:
        return at >= self.connected_at + (CLIENT_TIMEOUT if self.has_asked else REQUEST_TIMEOUT)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CLIENTS

    def __init__(self, family: int, address: tuple[Any, ...], node: NodeView) -> None:
        self.address_family = family
        self.node = node
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(node))
        self.is_local = is_loopback(str(address[0]))
        # Guards the clients below; connections are closed under it, so that none is mistaken for another.
        self._lock = threading.Lock()
        self._clients: dict[Any, _Client] = {}  # by connection, the oldest first
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, without resolving this host's name as ``HTTPServer`` does: that can take minutes."""
        socketserver.TCPServer.server_bind(self)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more client, or a client that has not asked yet can make room for it."""
        address = str(client_address[0])
        with self._lock:
            rivals = {r: client for r, client in self._clients.items() if client.address == address}
            if len(rivals) < MAX_OF_ADDRESS:
                rivals = self._clients if len(self._clients) >= MAX_CLIENTS else {}
            if rivals:
                silent = next((r for r, client in rivals.items() if not client.has_asked), None)
                if silent is None:
                    return False
                del self._clients[silent]
                _hang_up(silent)
            self._clients[request] = _Client(address, time.monotonic())
        return True

    def has_asked(self, request: Any) -> None:
        """Record that a client has sent its request."""
        with self._lock:
            if request in self._clients:
                self._clients[request].has_asked = True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._clients.pop(request, None)
            super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on clients that are too slow; called in each turn of the server's loop."""
        self.hang_up(overdue_at=time.monotonic())

    def hang_up(self, overdue_at: float = float("inf")) -> None:
        """Close the connections whose time is up at ``overdue_at``; their threads then find them closed."""
        with self._lock:
            for request, client in self._clients.items():
                if client.is_overdue(overdue_at):
                    _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep clients that hang up out of the job's log."""
        del request
        log.debug("The client %s of the health endpoint was lost", client_address, exc_info=True)  # noqa: LOG014 - called in a handler


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "redelastic"
    sys_version = ""
    timeout = CLIENT_TIMEOUT

    def do_GET(self) -> None:
        """Answer, in one line or with the metrics."""
        self.server.has_asked(self.request)
        try:
            status, kind, body = self._answer(self.path.partition("?")[0])
        except Exception as e:  # noqa: BLE001 - the client gets to see any exception of the agent's
            status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN_TEXT
            body = f"{self.path} failed: {type(e).__name__}: {e}".encode()
        if kind == PLAIN_TEXT:
            body = b" ".join(body.split()) + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        name, _ = host_and_port(self.headers.get("Host") or "localhost")
        if self.server.is_local and not names_loopback(name):  # a web page whose own name resolves to loopback
            refusal = b"On loopback only localhost and loopback addresses are answered, not this name."
            return HTTPStatus.FORBIDDEN, PLAIN_TEXT, refusal
        match path:
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self.server.registry)
            case "/livez":
                trouble = self.server.node.stalled()
            case "/readyz":
                trouble = self.server.node.unready()
            case _:
                return HTTPStatus.NOT_FOUND, PLAIN_TEXT, b"There are /livez, /readyz and /metrics."
        status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
        return status, PLAIN_TEXT, (trouble or "ok").encode()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in http.server
        """Keep requests out of the job's log."""


# -- the metrics

_Family = CounterMetricFamily | GaugeMetricFamily


class _Metric(NamedTuple):
    field: str  # of the status
    name: str
    help: str
    scale: float = 1.0  # from the field's unit to the metric's
    kind: type[_Family] = GaugeMetricFamily


NODE_METRICS: Final = (
    _Metric("epoch", "epoch", "Fencing token of the node's round."),
    _Metric("rank", "rank", "Rank of the node in its round."),
    _Metric("size", "world_size", "Number of nodes in the round."),
    _Metric("restarts", "restarts", "How often this node's workers were restarted.", kind=CounterMetricFamily),
    _Metric("job_restarts", "job_restarts", "Restarts of the whole job; restarts because of a lost node do not count."),
    _Metric("training_time", "training_seconds", "Time of the workers' new steps.", kind=CounterMetricFamily),
    _Metric("redone_time", "redone_seconds", "Time of steps that were made again.", kind=CounterMetricFamily),
    _Metric("node_time", "node_seconds", "Time since the node's agent began.", kind=CounterMetricFamily),
    _Metric("ettr", "effective_training_ratio", "Share of the node's time in which its workers made new steps."),
    _Metric("cpu", "cpu_cores", "CPU cores in use by the workers and their children.", 0.01),
    _Metric("memory", "memory_bytes", "Memory in use by the workers and their children."),
    _Metric("redis_away", "redis_away_seconds", "Time since Redis last answered; 0 while it does."),
)
WORKER_METRICS: Final = (
    _Metric("rank", "worker_rank", "Rank of the worker in the job."),
    _Metric("step", "worker_step", "Last step that the worker reported."),
    _Metric("idle", "worker_idle_seconds", "Time since the worker last reported progress."),
    _Metric("step_time", "worker_step_seconds", "Time of a step, over the last minute."),
    _Metric("own_time", "worker_own_seconds", "Time of a step in which the worker is in no collective."),
    _Metric("cpu", "worker_cpu_cores", "CPU cores in use by the worker and its children.", 0.01),
    _Metric("memory", "worker_memory_bytes", "Memory in use by the worker and its children."),
)
GPU_METRICS: Final = (
    _Metric("memory_used", "gpu_memory_used_bytes", "GPU memory in use."),
    _Metric("memory_total", "gpu_memory_size_bytes", "Total GPU memory."),
    _Metric("utilization", "gpu_utilization_ratio", "Share of the time in which the GPU was busy.", 0.01),
    _Metric("temperature", "gpu_temperature_celsius", "Temperature of the GPU."),
    _Metric("ecc", "gpu_ecc_errors", "Uncorrected ECC errors of the GPU.", kind=CounterMetricFamily),
    _Metric("xid", "gpu_xid_errors", "Xid errors not attributed to the application.", kind=CounterMetricFamily),
)
XIDS: Final = _Metric("n", "gpu_xids", "Xid errors by number, including the application's.", kind=CounterMetricFamily)


class _StatusCollector(Collector):
    """Turns the status into metrics on request; what is unknown has no sample."""

    def __init__(self, node: NodeView) -> None:
        self._node = node

    def collect(self) -> Iterator[_Family]:
        status = self._node.status()
        workers, gpus = status.get("workers") or (), status.get("gpus") or ()
        # By its name: its id is a new one after each restart.
        common = {"run_id": status.get("run_id", ""), "node": status.get("name", "")}
        state = status.get("state")

        yield _info(
            "node_info", "Id of the node, as events have it.", common, ("id",), [{"id": status.get("node", "")}]
        )
        one_of = _info("node_state", "1 for the state that the node is in.", common, ("state",), ())
        for each in dict.fromkeys([*STATES, state] if state else ()):
            one_of.add_metric(_values(common, ("state",), {"state": each}), float(each == state))
        yield one_of
        yield from _measured(NODE_METRICS, common, (), [status])
        yield _info("worker_state", "1 for the state that the worker is in.", common, ("local_rank", "state"), workers)
        yield from _measured(WORKER_METRICS, common, ("local_rank",), workers)
        yield _info("gpu_info", "Name of the GPU.", common, ("index", "uuid", "name"), gpus)
        yield from _measured(GPU_METRICS, common, ("index", "uuid"), gpus)
        by_number = [gpu | {"xid": xid, "n": n} for gpu in gpus for xid, n in _pairs(gpu.get("xids"))]
        yield from _measured([XIDS], common, ("index", "uuid", "xid"), by_number)


def _pairs(counts: object) -> Iterable[tuple[Any, Any]]:
    return counts.items() if isinstance(counts, dict) else ()


def _values(common: Mapping[str, Any], labels: Iterable[str], item: Mapping[str, Any]) -> list[str]:
    return [*map(str, common.values()), *(str(item.get(label, "")) for label in labels)]


def _info(
    name: str, text: str, common: Mapping[str, Any], labels: tuple[str, ...], items: Iterable[Mapping[str, Any]]
) -> GaugeMetricFamily:
    """A metric that is 1 for each item: the information is in its labels."""
    family = GaugeMetricFamily(f"redelastic_{name}", text, labels=[*common, *labels])
    for item in items:
        family.add_metric(_values(common, labels, item), 1.0)
    return family


def _measured(
    metrics: Iterable[_Metric], common: Mapping[str, Any], labels: tuple[str, ...], items: Iterable[Mapping[str, Any]]
) -> Iterator[_Family]:
    for metric in metrics:
        family = metric.kind(f"redelastic_{metric.name}", metric.help, labels=[*common, *labels])
        for item in items:
            value = item.get(metric.field)
            if isinstance(value, (int, float)):
                family.add_metric(_values(common, labels, item), value * metric.scale)
        yield family
