"""The health endpoint over real sockets: supervisors, Prometheus, and clients that behave badly."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import prometheus_client
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from redelastic.host import health_endpoint
from redelastic.host.health_endpoint import HealthEndpoint

STATUS: Mapping[str, Any] = {
    "run_id": "job",
    "node": "host-1-ab",
    "name": "alpha",
    "state": "draining",
    "epoch": 7,
    "rank": 1,
    "size": 3,
    "restarts": 2,
    "job_restarts": 5,
    "cpu": 150.0,
    "training_time": 30.0,
    "redone_time": 10.0,
    "node_time": 60.0,
    "ettr": 0.5,
    "memory": 1 << 30,
    "redis_away": 1.5,
    "workers": [
        {
            "local_rank": 0,
            "rank": 2,
            "pid": 17,
            "state": "HEALTHY",
            "step": 41,
            "idle": 0.25,
            "cpu": 80,
            "memory": 4096,
        },
        {"local_rank": 1, "rank": 3, "pid": 18, "state": "HEALTHY", "step": None},
    ],
    "gpus": [
        {
            "index": 0,
            "uuid": "GPU-1",
            "name": 'an "odd" name\\',
            "memory_used": 100,
            "memory_total": 400,
            "utilization": 25,
            "temperature": 60,
            "ecc": 3,
            "xid": 1,
            "xids": {"31": 2, "79": 1},
        }
    ],
}
TIMEOUT = 30.0  # in seconds, for requests that take milliseconds
RUN = {"run_id": "job", "node": "alpha"}


class FakeNode:
    """An agent as the endpoint sees it; the test sets each part."""

    def __init__(self) -> None:
        self.why_stalled = ""
        self.why_unready = ""
        self.asked: Callable[[], Mapping[str, Any]] = lambda: STATUS

    def stalled(self) -> str:
        return self.why_stalled

    def unready(self) -> str:
        return self.why_unready

    def status(self) -> Mapping[str, Any]:
        return self.asked()


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def endpoint(node: FakeNode) -> Iterator[HealthEndpoint]:
    started = HealthEndpoint(node, port=0)
    started.start()
    yield started
    started.stop()


def ask(
    endpoint: HealthEndpoint, path: str, method: str = "GET", host: str = "127.0.0.1"
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(host, endpoint.port, timeout=TIMEOUT)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers
    finally:
        connection.close()


def metrics(endpoint: HealthEndpoint) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    status, body, headers = ask(endpoint, "/metrics")
    assert (status, headers["Content-Type"]) == (200, prometheus_client.CONTENT_TYPE_LATEST)
    return {
        (sample.name.removeprefix("redelastic_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def labels(**more: str) -> frozenset[tuple[str, str]]:
    return frozenset((RUN | more).items())


def test_livez_and_readyz_say_why_not(endpoint: HealthEndpoint, node: FakeNode) -> None:
    assert ask(endpoint, "/livez")[:2] == (200, "ok\n")
    assert ask(endpoint, "/readyz?verbose")[:2] == (200, "ok\n")
    node.why_stalled = "the agent's loop has not run for 72 s"
    assert ask(endpoint, "/livez")[:2] == (503, "the agent's loop has not run for 72 s\n")
    assert ask(endpoint, "/readyz")[0] == 200
    node.why_unready = "waits for a round:\n1 of 2 nodes"
    assert ask(endpoint, "/readyz")[:2] == (503, "waits for a round: 1 of 2 nodes\n")


def test_metrics_carry_the_whole_status_in_base_units(endpoint: HealthEndpoint) -> None:
    gpu = {"index": "0", "uuid": "GPU-1"}
    assert metrics(endpoint) == {
        ("node_info", labels(id="host-1-ab")): 1,
        **{
            ("node_state", labels(state=state)): float(state == "draining")
            for state in ("waiting", "running", "parked", "draining", "barred", "refused")
        },
        ("epoch", labels()): 7,
        ("rank", labels()): 1,
        ("world_size", labels()): 3,
        ("restarts_total", labels()): 2,
        ("job_restarts", labels()): 5,
        ("training_seconds_total", labels()): 30,
        ("redone_seconds_total", labels()): 10,
        ("node_seconds_total", labels()): 60,
        ("effective_training_ratio", labels()): 0.5,
        ("cpu_cores", labels()): 1.5,
        ("memory_bytes", labels()): 1 << 30,
        ("redis_away_seconds", labels()): 1.5,
        ("worker_state", labels(local_rank="0", state="HEALTHY")): 1,
        ("worker_state", labels(local_rank="1", state="HEALTHY")): 1,
        ("worker_rank", labels(local_rank="0")): 2,
        ("worker_rank", labels(local_rank="1")): 3,
        ("worker_step", labels(local_rank="0")): 41,  # worker 1 has reported no step, and has no series
        ("worker_idle_seconds", labels(local_rank="0")): 0.25,
        ("worker_cpu_cores", labels(local_rank="0")): 0.8,
        ("worker_memory_bytes", labels(local_rank="0")): 4096,
        ("gpu_info", labels(**gpu, name='an "odd" name\\')): 1,
        ("gpu_memory_used_bytes", labels(**gpu)): 100,
        ("gpu_memory_size_bytes", labels(**gpu)): 400,
        ("gpu_utilization_ratio", labels(**gpu)): 0.25,
        ("gpu_temperature_celsius", labels(**gpu)): 60,
        ("gpu_ecc_errors_total", labels(**gpu)): 3,
        ("gpu_xid_errors_total", labels(**gpu)): 1,
        ("gpu_xids_total", labels(**gpu, xid="31")): 2,
        ("gpu_xids_total", labels(**gpu, xid="79")): 1,
    }


def test_a_node_that_starts_again_keeps_its_series(endpoint: HealthEndpoint, node: FakeNode) -> None:
    """Its new id must not start new series for all of its metrics."""
    before = metrics(endpoint)
    node.asked = lambda: {**STATUS, "node": "host-1-cd"}
    assert {name for (name, _), _ in before.items() ^ metrics(endpoint).items()} == {"node_info"}


def test_metrics_follow_the_conventions(endpoint: HealthEndpoint) -> None:
    families = list(text_string_to_metric_families(ask(endpoint, "/metrics")[1]))
    assert all(family.name.startswith("redelastic_") and family.documentation for family in families)
    assert {family.type for family in families} == {"gauge", "counter"}
    for family in families:
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples)


def test_metrics_of_a_status_with_few_fields(endpoint: HealthEndpoint, node: FakeNode) -> None:
    node.asked = dict
    unnamed = frozenset({("run_id", ""), ("node", "")})
    assert metrics(endpoint) == {("node_info", unnamed | {("id", "")}): 1}
    node.asked = lambda: {"epoch": "seven", "cpu": None, "workers": [{}], "gpus": None, "state": "odd"}
    found = metrics(endpoint)
    assert found["node_state", unnamed | {("state", "odd")}] == 1
    assert found["node_state", unnamed | {("state", "running")}] == 0
    assert not {name for name, _ in found} & {"epoch", "cpu_cores", "worker_step", "gpu_info"}


def test_metrics_are_current_and_from_no_other_registry(endpoint: HealthEndpoint, node: FakeNode) -> None:
    node.asked = lambda: {**STATUS, "epoch": 8}
    found = metrics(endpoint)
    assert found["epoch", labels()] == 8
    assert not {name for name, _ in found if name.startswith(("python_", "process_"))}
    assert not [f for f in prometheus_client.REGISTRY.collect() if f.name.startswith("redelastic")]


def test_an_agent_that_raises_is_answered_500_in_one_line_and_served_again(
    endpoint: HealthEndpoint, node: FakeNode, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Mapping[str, Any]:
        raise RuntimeError("no\nstatus")

    node.asked = broken
    assert ask(endpoint, "/metrics")[:2] == (500, "/metrics failed: RuntimeError: no status\n")
    node.stalled = broken  # type: ignore[method-assign, assignment]
    assert ask(endpoint, "/livez")[:2] == (500, "/livez failed: RuntimeError: no status\n")
    node.asked = lambda: STATUS
    assert metrics(endpoint)
    assert capfd.readouterr() == ("", "")


def test_other_paths_and_methods_are_refused(endpoint: HealthEndpoint) -> None:
    status, body, _ = ask(endpoint, "/")
    assert (status, body) == (404, "There are /livez, /readyz and /metrics.\n")
    assert ask(endpoint, "//[livez")[0] == 404
    assert ask(endpoint, "/livez", "POST")[0] == 501
    assert ask(endpoint, "/livez", "DELETE")[0] == 501


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/elsewhere"])
def test_head_is_get_without_the_body(endpoint: HealthEndpoint, path: str) -> None:
    got, head = ask(endpoint, path), ask(endpoint, path, "HEAD")
    assert head[0] == got[0]
    assert head[1] == ""
    assert head[2]["Content-Length"] == str(len(got[1])) == got[2]["Content-Length"]
    with connect(endpoint, f"HEAD {path} HTTP/1.0\r\n\r\n".encode()) as client:
        assert client.makefile("rb").read().endswith(b"\r\n\r\n")


def connect(endpoint: HealthEndpoint, said: bytes = b"", of: str = "127.0.0.1") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", endpoint.port), timeout=TIMEOUT, source_address=(of, 0))
    client.sendall(said)
    return client


def test_clients_without_a_whole_request_delay_no_other_and_are_disconnected(
    node: FakeNode, capfd: pytest.CaptureFixture[str]
) -> None:
    """A client has a second for its request."""
    endpoint = HealthEndpoint(node, port=0)
    endpoint.start()
    clients = [connect(endpoint, said) for said in (b"", b"GET /livez HTTP/1.1\r\nHost:", b"\r\n" * 3)]
    assert ask(endpoint, "/livez")[0] == 200
    for client in clients:
        assert client.recv(1) == b""
    endpoint.stop()
    for client in clients:
        client.close()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets long timeouts for clients and their requests."""
    monkeypatch.setattr(health_endpoint, "REQUEST_TIMEOUT", 60.0)
    monkeypatch.setattr(health_endpoint, "CLIENT_TIMEOUT", 60.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.fault("silent connections fill the health endpoint", "a supervisor is answered")
@pytest.mark.parametrize("said", [b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"], ids=["nothing", "half"])
def test_the_oldest_silent_client_makes_room(endpoint: HealthEndpoint, said: bytes) -> None:
    """The clients may be of one address or of many."""
    room = health_endpoint.MAX_OF_ADDRESS
    for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"):
        first, *others = [connect(endpoint, said, address) for _ in range(room)]
        assert ask(endpoint, "/livez")[:2] == (200, "ok\n")
        if address != "127.0.0.1":
            with connect(endpoint, said, address):
                assert first.recv(1) == b"", "the oldest of the same address"
        for client in (first, *others):
            client.close()
    clients = [connect(endpoint, said, f"127.0.0.{2 + i % 60}") for i in range(health_endpoint.MAX_CLIENTS)]
    for _ in range(3):
        assert ask(endpoint, "/livez")[:2] == (200, "ok\n")
    assert clients[0].recv(1) == b""
    for client in clients:
        client.close()


@pytest.mark.usefixtures("patient")
def test_requests_in_flight_of_one_address_leave_room_for_others(endpoint: HealthEndpoint, node: FakeNode) -> None:
    asked, release = threading.Semaphore(0), threading.Event()

    def hang() -> Mapping[str, Any]:
        asked.release()
        release.wait(60)
        return {}

    node.asked = hang
    metrics_ = b"GET /metrics HTTP/1.0\r\n\r\n"
    clients = [connect(endpoint, metrics_, "127.0.0.2") for _ in range(health_endpoint.MAX_OF_ADDRESS)]
    for _ in clients:
        assert asked.acquire(timeout=TIMEOUT)
    with connect(endpoint, metrics_, "127.0.0.2") as one_more:
        assert one_more.recv(1) == b""
    assert ask(endpoint, "/livez")[0] == 200
    release.set()
    for client in clients:
        assert client.recv(12) == b"HTTP/1.0 200"
        client.close()


def test_on_loopback_a_name_from_elsewhere_is_refused(endpoint: HealthEndpoint, node: FakeNode) -> None:
    """An endpoint on another address accepts any name."""

    def status(of: HealthEndpoint, host: bytes) -> bytes:
        with connect(of, b"GET /metrics HTTP/1.1\r\nHost: " + host + b"\r\n\r\n") as client:
            return client.makefile("rb").readline().split()[1]

    everywhere = HealthEndpoint(node, host="0.0.0.0", port=0)  # noqa: S104
    everywhere.start()
    for local in (b"localhost", b"127.0.0.1:80", b"[::1]", b""):
        assert status(endpoint, local) == b"200", local
    for foreign in (b"evil.example", b"localhost.evil.example:1", b"127.1", b"[", b"a@localhost"):
        assert status(endpoint, foreign) == b"403", foreign
        assert status(everywhere, foreign) == b"200"
    everywhere.stop()


@pytest.mark.usefixtures("patient")
def test_stop_waits_neither_for_clients_nor_for_the_agent(node: FakeNode) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang() -> Mapping[str, Any]:
        asked.set()
        release.wait(60)
        return {}

    node.asked = hang
    endpoint = HealthEndpoint(node, port=0)
    endpoint.start()
    clients = [connect(endpoint), connect(endpoint, b"GET /metrics HTTP/1.0\r\n\r\n")]
    assert asked.wait(TIMEOUT)
    begun = time.monotonic()
    endpoint.stop()
    assert time.monotonic() - begun < health_endpoint.CLIENT_TIMEOUT / 2, "30 s of 60"
    assert [client.recv(1) for client in clients] == [b"", b""]
    with pytest.raises(ConnectionError):
        connect(endpoint)
    release.set()
    for client in clients:
        client.close()
    endpoint.stop()  # a second stop does nothing


def test_a_client_that_hangs_up_during_the_answer_is_logged_for_debugging(
    endpoint: HealthEndpoint, node: FakeNode, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG", health_endpoint.__name__)
    answered = threading.Event()
    huge = "x" * (8 << 20)  # more than the sockets hold: the answer has to wait for its reader

    def slow() -> Mapping[str, Any]:
        answered.set()
        return {"name": huge}

    node.asked = slow
    connect(endpoint, b"GET /metrics HTTP/1.0\r\n\r\n").close()
    assert answered.wait(TIMEOUT)
    assert ask(endpoint, "/livez")[0] == 200
    deadline = time.monotonic() + TIMEOUT
    while not caplog.records:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [record.levelname for record in caplog.records] == ["DEBUG"], "the lost answer is the only record"
    assert capfd.readouterr() == ("", "")


def test_the_error_of_a_port_in_use_says_what_to_do(endpoint: HealthEndpoint, node: FakeNode) -> None:
    second = HealthEndpoint(node, port=endpoint.port)
    with pytest.raises(OSError, match=rf"port {endpoint.port} of 127\.0\.0\.1: .*in use; end the process") as raised:
        second.start()
    assert isinstance(raised.value.__cause__, OSError)
    second.stop()
    assert ask(endpoint, "/livez")[0] == 200


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist_is_refused(node: FakeNode, port: int) -> None:
    with pytest.raises(ValueError, match=f"port {port}: use 1 to 65535"):
        HealthEndpoint(node, port=port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(node: FakeNode, host: str) -> None:
    with pytest.raises(OSError, match=f"of {host}: .*use an address of this machine"):
        HealthEndpoint(node, host=host, port=0).start()


def test_the_endpoint_listens_on_loopback_by_default(endpoint: HealthEndpoint, node: FakeNode) -> None:
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == endpoint.port] == ["127.0.0.1"]
    everywhere = HealthEndpoint(node, host="0.0.0.0", port=0)  # noqa: S104
    everywhere.start()
    assert ask(everywhere, "/livez")[0] == 200
    everywhere.stop()


def test_ipv6(node: FakeNode) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as e:
        pytest.skip(f"no IPv6 here: {e}")
    endpoint = HealthEndpoint(node, host="::1", port=0)
    endpoint.start()
    assert ask(endpoint, "/livez", host="::1")[0] == 200
    endpoint.stop()
