"""The recipes of examples/ for clouds: notice that a spot VM is taken away, and a managed Redis."""

from __future__ import annotations

import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
import redis
from typing_extensions import Self

from redelastic.redis.errors import ACL_RULES
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.examples_site import (
    ACCURACY,
    AWARE,
    EXAMPLES,
    LIMIT,
    Site,
    members,
    record,
)
from tests.support.tls_files import make_certificates
from tests.support.tls_servers import WHO_SPEAKS_TLS, tls_server

pytestmark = pytest.mark.timeout(300)

NOTICES: Final = {
    "aws": ("/latest/meta-data/spot/instance-action", b'{"action": "terminate", "time": "2026-11-21T08:22:00Z"}'),
    "gcp": ("/computeMetadata/v1/instance/preempted", b"TRUE"),
    "azure": ("/metadata/scheduledevents", b'{"Events": [{"EventType": "Preempt", "EventStatus": "Scheduled"}]}'),
}
QUIET: Final = {"gcp": b"FALSE", "azure": b'{"DocumentIncarnation": 1, "Events": []}'}  # aws: not found


class Metadata:
    """The metadata service of a cloud, on loopback: it asks for what the cloud asks for, and may give notice."""

    def __init__(self, cloud: str) -> None:
        self.notice = threading.Event()
        self.asked = threading.Event()
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self.answer(b"a-token" if known else None)

            def do_GET(self) -> None:
                path, notice = NOTICES[cloud]
                headers = {"aws": ("X-aws-ec2-metadata-token", "a-token"), "gcp": ("Metadata-Flavor", "Google")}
                name, value = headers.get(cloud, ("Metadata", "true"))
                known = self.path.partition("?")[0] == path and self.headers[name] == value
                self.answer((notice if metadata.notice.is_set() else QUIET.get(cloud)) if known else None)
                if known:
                    metadata.asked.set()

            def answer(self, body: bytes | None) -> None:
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


WAITS: Final = "import signal; signal.sigtimedwait({signal.SIGUSR1}, 100) and print('noticed')"


NEEDS_CURL: Final = pytest.mark.skipif(not shutil.which("curl"), reason="the recipe needs curl: apt-get install curl")


@pytest.mark.long
@NEEDS_CURL
@pytest.mark.parametrize("cloud", NOTICES)
def test_notices_of_clouds(tmp_path: Path, cloud: str) -> None:
    """Only a notice is one; and the watch ends with what it watches over."""
    prepare = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); "
    with Site(tmp_path) as site, Metadata(cloud) as metadata:
        recipe = site.recipe("spot.sh")
        node = site.start(recipe, cloud, sys.executable, "-c", prepare + WAITS, METADATA=metadata.url)
        for _ in range(2):  # the second time, the first answer has been understood
            metadata.asked.clear()
            assert metadata.asked.wait(LIMIT)
        assert node.poll() is None
        metadata.notice.set()
        assert site.wait_end(node) == 0
        assert site.log == "noticed\n"
        other = site.start(recipe, cloud, "true", METADATA=metadata.url)
        assert site.wait_end(other) == 0
        site.wait("the watch has ended too", lambda: not site.processes())
        assert site.wait_end(site.start(recipe, "nimbus", "true")) == 2


@pytest.mark.long
@NEEDS_CURL
@pytest.mark.fault("the cloud takes a spot VM away", "its node drains at the notice, the others go on")
def test_a_spot_vm_is_taken_away(server: RedisServer, run_id: str, tmp_path: Path) -> None:
    command = ["redelastic", "run", f"--rdzv-id={run_id}", "--nnodes=1:2", str(AWARE), str(tmp_path)]
    with Site(tmp_path) as site, Metadata("aws") as calm, Metadata("aws") as alarmed:
        recipe = site.recipe("spot.sh")
        where = {"REDELASTIC_REDIS_URL": server.url}
        stays = site.start(recipe, "aws", *command, METADATA=calm.url, TEST_NODE="stays", **where)
        goes = site.start(recipe, "aws", *command, METADATA=alarmed.url, TEST_NODE="goes", **where)
        control = site.control()
        site.wait("both train", lambda: members(control, 2))
        alarmed.notice.set()
        assert site.wait_end(goes) == 75
        assert {line["node"] for line in record(tmp_path, "saved")} == {"stays", "goes"}
        site.wait("the other one goes on", lambda: members(control, 1))
        (tmp_path / "finish").touch()
        assert site.wait_end(stays) == 0
        site.wait("the watches have ended", lambda: not site.processes())


@pytest.mark.long
@pytest.mark.parametrize("speaker", WHO_SPEAKS_TLS)
def test_a_managed_redis(tmp_path: Path, speaker: str) -> None:
    """TLS with a CA of its own, a user with the recipe's access string, a password that needs encoding; to the end."""
    text = (EXAMPLES / "managed_redis.sh").read_text()
    rules = text.partition("\n#   on ")[2].partition("\nset ")[0].replace("\n#  ", "").split()
    expected = ACL_RULES.replace("<key_prefix>", "redelastic").replace("<run_id>", "my-job*")
    assert rules == expected.split()
    password = "p@ss/w:rd #1%?"
    (tmp_path / ".redis-password").write_text(password + "\n")
    certificates = make_certificates(tmp_path)
    with tls_server(speaker, None, certificates, ask_clients=False) as (managed, url), Site(tmp_path) as site:
        with managed.get_client() as admin:
            admin.execute_command("ACL SETUSER", "my-job", "reset", "on", f">{password}", *rules)
        where = {"REDIS_ADDRESS": urlsplit(url).netloc.rpartition("@")[2], "REDIS_CA": certificates.ca}
        recipe = site.recipe("managed_redis.sh")
        nodes = [site.start(recipe, "my-job-1", **where) for _ in range(2)]
        control = site.control()
        site.wait("both are in a round", lambda: members(control, 2, steps=False))
        site.assert_no_password_is_seen()
        assert [site.wait_end(node) for node in nodes] == [0, 0]
        assert float(ACCURACY.findall(site.log)[0]) >= 0.95
        assert site.log.count("fit for a run") + site.log.count("warning") >= 2, "what the doctor says"
        user = redis.Redis(port=servers.port_of(managed), username="my-job", password=password)
        with user, pytest.raises(redis.exceptions.NoPermissionError):
            user.get("redelastic:{other-job}:run")
        assert site.wait_end(site.start(recipe, **where)) == 2
        assert "usage: " in site.log
        refused = site.start(recipe, "other-job", **where)
        assert site.wait_end(refused) == 1
        assert "problem" in site.log
        (tmp_path / ".redis-password").unlink()
        assert site.wait_end(site.start(recipe, "my-job-2", **where)) == 2
        assert "put the password of the user my-job into ~/.redis-password" in site.log
