"""TLS with client certificates: a job, its workers and the commands; and certificates that have expired."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from redelastic.monitoring.control import RunControl
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.errors import UnavailableError
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.redis.sockets import TlsConnection
from tests.support.agent_job import AWARE, AgentJob
from tests.support.job_user import CANARY, AsUser, output_of
from tests.support.tls_files import Certificates, make_certificates
from tests.support.tls_servers import WHO_SPEAKS_TLS, tls_server

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@contextlib.contextmanager
def strict_server(speaker: str, certificates: Certificates, certificate: str = "") -> Iterator[AsUser]:
    """A server that asks for client certificates."""
    with tls_server(speaker, CANARY, certificates, ask_clients=True, certificate=certificate) as (server, url):
        yield AsUser(server, url)


def files(certificates: Certificates) -> dict[str, str]:
    return {"ca_cert": certificates.ca, "ssl_cert": certificates.client, "ssl_cert_key": certificates.client_key}


def expired(certificate: str, ca: str, target: Path) -> str:
    """The same certificate, as its CA signed it for a day that is over."""
    old = x509.load_pem_x509_certificate(Path(certificate).read_bytes())
    key = serialization.load_pem_private_key(Path(ca).with_suffix(".key").read_bytes(), None)
    now = dt.datetime.now(dt.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(old.subject).issuer_name(old.issuer).public_key(old.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(days=3))
    builder = builder.not_valid_after(now - dt.timedelta(days=2))
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, critical=extension.critical)
    target.write_bytes(builder.sign(cast("Any", key), hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return str(target)


@pytest.mark.fault("a certificate that has expired", "refused at once, with what to look at")
@pytest.mark.parametrize("speaker", WHO_SPEAKS_TLS)
@pytest.mark.parametrize("whose", ["server", "client"])
def test_an_expired_certificate(certificates: Certificates, tmp_path: Path, whose: str, speaker: str) -> None:
    old = expired(getattr(certificates, whose), certificates.ca, tmp_path / "old.crt")
    given = files(certificates) | ({"ssl_cert": old} if whose == "client" else {})
    with strict_server(speaker, certificates, old if whose == "server" else "") as server:
        with pytest.raises(UnavailableError, match=r"(?i)TLS with Redis at .* failed: .*expired.*Check") as raised:
            Connection.open(parse_endpoint(server.url, **given), connect_timeout=30)
        assert CANARY not in str(raised.value)


def test_a_refusal_that_comes_before_the_first_command(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TLS 1.3 the server looks at the client's certificate when the client's handshake is over."""
    old = expired(certificates.client, certificates.ca, tmp_path / "old.crt")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.ca)
    context.load_cert_chain(certificates.server, certificates.server_key)
    context.verify_mode = ssl.CERT_REQUIRED
    refused = threading.Semaphore(0)

    def refuse_all(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                channel, _ = listener.accept()
                with contextlib.suppress(ssl.SSLError):
                    context.wrap_socket(channel, server_side=True)
                refused.release()

    connect = TlsConnection._connect  # to hold the client between handshake and command

    def connect_and_wait(connection: TlsConnection) -> socket.socket:
        channel = connect(connection)
        assert refused.acquire(timeout=60)
        return channel

    monkeypatch.setattr(TlsConnection, "_connect", connect_and_wait)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse_all, args=(listener,))
        thread.start()
        url = f"rediss://127.0.0.1:{listener.getsockname()[1]}"
        endpoint = parse_endpoint(url, **(files(certificates) | {"ssl_cert": old}))
        try:
            with pytest.raises(UnavailableError, match=r"(?i)TLS with Redis at .* failed: .*expired.*Check"):
                Connection.open(endpoint, connect_timeout=10)
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
            thread.join()


@pytest.mark.parametrize("speaker", WHO_SPEAKS_TLS)
def test_a_job_over_tls_with_client_certificates(certificates: Certificates, tmp_path: Path, speaker: str) -> None:
    """`redelastic run`, its workers and the commands; and the store of a script's own."""
    with strict_server(speaker, certificates) as server:
        conf = cast("Any", files(certificates))
        job = AgentJob.__new__(AgentJob)
        super(AgentJob, job).__init__(cast("RedisServer", server), tmp_path, "1:2", agent=True, conf=conf)
        with job:
            job.control = RunControl(Connection.open(parse_endpoint(server.url, **conf)), RunKeys(job.run_id))
            job.start("a", "b", script=AWARE)
            job.wait_round("ab")
            options = (
                "--ca-cert",
                conf["ca_cert"],
                "--ssl-cert",
                conf["ssl_cert"],
                "--ssl-cert-key",
                conf["ssl_cert_key"],
            )
            status = json.loads(output_of("status", job.run_id, "--json", *options, url=server.url))
            assert {node["name"] for node in status["nodes"]} == {"a", "b"}
            job.tell("finish")
            assert job.wait_end("a") == job.wait_end("b") == 0
