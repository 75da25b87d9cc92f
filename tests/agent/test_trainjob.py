"""What Kubeflow Trainer is told of a job, over TLS, with the pod's token."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from redelastic.agent.trainjob import CA, TOKEN, URL, TrainJob, metrics_of
from tests.support.servers import HOST
from tests.support.tls_files import Certificates, make_certificates

STATUS = {"epoch": 3, "size": 4, "job_restarts": 1, "ettr": 0.97531, "workers": [{"step": 7}, {"step": 9}, {}]}


class Controller(ThreadingHTTPServer):
    """Stands for Kubeflow's controller; keeps what it is sent, and answers with `code`."""

    def __init__(self, certificates: Certificates) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        self.code = 200
        super().__init__((HOST, 0), Answer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.server, certificates.server_key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    server: Controller

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def controller(certificates: Certificates) -> Iterator[Controller]:
    with Controller(certificates) as found:
        yield found
        found.shutdown()


def job_at(controller: Controller, ca: str, token: Path) -> TrainJob:
    url = f"https://{HOST}:{controller.server_port}/apis/x/status"
    found = TrainJob.of_environment({URL: url, CA: ca, TOKEN: str(token)})
    assert found
    return found


def test_the_trainer_gets_the_progress_of_the_job(
    controller: Controller, certificates: Certificates, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    job = job_at(controller, certificates.ca, token)
    for text in ("first\n", "renewed\n"):
        token.write_text(text)
        job.report(STATUS)
    assert [(path, login) for path, login, _ in controller.seen] == [
        ("/apis/x/status", "Bearer first"),
        ("/apis/x/status", "Bearer renewed"),
    ]
    status = controller.seen[0][2]["trainerStatus"]
    values = {"step": "9", "round": "3", "nodes": "4", "restarts": "1", "effectiveTrainingTime": "0.9753"}
    assert status["metrics"] == [{"name": name, "value": value} for name, value in values.items()]
    assert status["lastUpdatedTime"].endswith("Z")


def test_what_is_refused_or_cannot_be_read_is_an_error(
    controller: Controller, certificates: Certificates, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    with pytest.raises(FileNotFoundError):
        job_at(controller, certificates.ca, token).report(STATUS)
    token.write_text("x")
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        job_at(controller, certificates.other_ca, token).report(STATUS)
    assert controller.seen == [], "the token goes to nobody else"
    controller.code = 429
    with pytest.raises(urllib.error.HTTPError, match="429"):
        job_at(controller, certificates.ca, token).report(STATUS)


def test_where_nobody_asks_nothing_is_sent() -> None:
    assert TrainJob.of_environment({}) is None
    assert TrainJob.of_environment({URL: "https://x", CA: "", TOKEN: "/token"}) is None
    assert metrics_of({}) == {}
