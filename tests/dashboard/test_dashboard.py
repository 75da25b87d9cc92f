"""The dashboard's server: whom it lets in, and what it serves them."""

from __future__ import annotations

import json
import re
import resource
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from redelastic.monitoring.events import Log, Started
from redelastic.redis.server import RedisServer
from tests.support.browsing import dashboard
from tests.support.commands import run_command, until
from tests.support.crowds import Crowd

TOKEN = "a-token-of-enough-characters"
SILENT = "not known: all nodes fell silent"
OF_THE_MOMENT = {"age", "ettr", "heard", "lease", "redone", "time", "verdict"}


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


OPENER = urllib.request.build_opener(_NoRedirect)


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with OPENER.open(urllib.request.Request(url, headers=named, method=method), timeout=30) as answer:  # noqa: S310
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, dict(e.headers), e.read().decode()


def listen(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=30)  # noqa: S310


@pytest.fixture(scope="module")
def url(server: RedisServer) -> Iterator[str]:
    """A dashboard for everybody on this machine."""
    with dashboard(f"--endpoint={server.url}") as (found, _):
        yield found


class TestWhoIsLetIn:
    def test_headers_forbid_frames_and_foreign_scripts(self, url: str) -> None:
        for path in ("", "runs/x", "page/main.js", "page/../app.py", "api/runs", "api/runs/no-such-run", "no-such"):
            _, headers, _ = ask(url + path)
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "frame-ancestors 'none'" in policy
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"

    def test_nothing_can_be_changed_through_it(self, url: str) -> None:
        for path in ("", "live", "api/runs", "api/runs/x", "page/main.js"):
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                assert ask(url + path, method)[0] == 405

    def test_a_page_from_elsewhere_cannot_read_it_under_a_name_of_its_own(self, url: str) -> None:
        for local in (
            "localhost:1",
            "LOCALHOST",
            "127.0.0.1",
            "127.0.0.2:80",
            "127.255.255.254",
            "[::1]",
            "[::1]:1",
        ):
            assert ask(f"{url}api/runs", Host=local)[0] == 200, local
        for foreign in (
            *("evil.example:8370", "localhost.evil.example", "127.0.0.1.evil.example", "evil.localhost", "127.1"),
            *(
                "0.0.0.0:1",
                "192.168.0.1",
                "[::]",
                "[fe80::1]",
                "[localhost]x",
                "127.0.0.1:1:2",
                "a@localhost",
                "x:y",
            ),
        ):
            code, _, said = ask(f"{url}api/runs", Host=foreign)
            assert (code, "not to this name" in said) == (403, True), foreign

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
    def test_whatever_loopback_is_called(self, server: RedisServer, host: str) -> None:
        with dashboard(f"--endpoint={server.url}", f"--host={host}") as (url, _):
            assert url.startswith(f"http://{host}:")
            assert ask(f"{url}api/runs")[0] == 200
            if host == "localhost":
                port = url.rstrip("/").rpartition(":")[2]
                for address in ("127.0.0.1", "[::1]") if has_ipv6_loopback() else ("127.0.0.1",):
                    assert ask(f"http://{address}:{port}/api/runs")[0] == 200, address

    def test_elsewhere_it_asks_for_a_token(self, server: RedisServer, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text(f"{TOKEN}\n")
        with dashboard(f"--endpoint={server.url}", "--host=0.0.0.0", f"--token-file={file}") as (shown, process):
            url = shown.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
            assert TOKEN not in process.out
            for path in ("", "live", "api/runs", "page/main.js"):
                code, headers, body = ask(url + path)
                assert (code, headers["www-authenticate"]) == (401, "Bearer")
                assert "--token-file" in body
                assert ask(f"{url}{path}?token=wrong")[0] == 401
                assert ask(url + path, Cookie=f"redelastic-dashboard={TOKEN}", Host="a")[0] == 401
                assert ask(url + path, Authorization=f"Basic {TOKEN}")[0] == 401
            assert ask(f"{url}api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
            code, headers, _ = ask(f"{url}runs/x?a=1&token={TOKEN}")
            assert (code, headers["location"]) == (303, "/runs/x?a=1")
            for path in ("/evil.example/", "//evil.example/", "\\evil.example/", "/\\evil.example"):
                code, headers, _ = ask(f"{url}{path}?token={TOKEN}")
                assert code == 303
                assert re.match("/[^/\\\\]", headers["location"]), "it stays on this host"
            cookie = headers["set-cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=strict" in cookie
            assert TOKEN not in cookie
            named, _, given = cookie.partition(";")[0].partition("=")
            port = url.rstrip("/").rpartition(":")[2]
            assert named == f"redelastic-dashboard-{port}", "each port of a host has its own"
            assert ask(f"{url}api/runs", Cookie=f"redelastic-dashboard-1=x; {named}={given}")[0] == 200
            assert ask(f"{url}api/runs", Cookie=f"{named}={given}", Host="a.example:1")[0] == 401
            cookie = ask(f"{url}?token={TOKEN}", Host="a.example")[1]["set-cookie"]
            assert cookie.startswith("redelastic-dashboard="), "behind a proxy on the port of the scheme"

    def test_wrong_arguments(self, url: str, server: RedisServer, tmp_path: Path) -> None:
        short = tmp_path / "short"
        short.write_text("secret\n")
        port = url.rstrip("/").rpartition(":")[2]
        for arguments, said in [
            (("--host=0.0.0.0",), "--host 0.0.0.0 is not loopback: give --token-file FILE"),
            (("--host=no.such.host.invalid",), "--host no.such.host.invalid is not an address of this machine"),
            (("--token-file", str(tmp_path / "none")), "cannot be read"),
            (("--token-file", str(short)), "has a token of 6 characters; use 16 or more"),
            (("--port", port), f"cannot listen on port {port} of localhost: Address already in use"),
            (("--port", "70000"), "must be a whole number from 0 to 65,535"),
            (("--allow-actions",), "--allow-actions needs --token-file FILE"),
            (("--link", "Logs=javascript:alert(1)"), "must be NAME=URL with a URL of http or https"),
            (
                ("--link", "Logs=https://logs/{rank}"),
                "and only {end}, {host}, {node}, {run}, {start} are known",
            ),
        ]:
            done = run_command("dashboard", "--endpoint", server.url, *arguments)
            assert done.code == 2, arguments
            assert said in done.err
            assert done.err.count("\n") == 1
        assert run_command("dashboard", "--endpoint", "127.0.0.1:1").code == 3


@pytest.mark.fault("a thousand silent connections to the dashboard, few files", "it answers, and logs nothing")
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: "], ids=["nothing", "half"])
def test_silent_connections_make_room(server: RedisServer, tmp_path: Path, said: bytes) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with dashboard(f"--endpoint={server.url}", f"--token-file={token}") as (url, process):
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (400, limits[1]))
        port = int(url.rstrip("/").rpartition(":")[2])
        stream = ask_for_stream(port)
        silent = []
        for i in range(1000):
            client = socket.create_connection(("127.0.0.1", port), timeout=30)
            client.sendall(said)
            silent.append(client)
            if i % 100 == 99:
                assert ask(f"{url}api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
                assert stream.recv(1), "who has asked is served on"
        for client in silent:
            client.close()
        stream.close()
        assert process.err == ""


def ask_for_stream(port: int) -> socket.socket:
    """A connection on which the list of runs is followed."""
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(f"GET /live HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def timeless(shown: Any) -> Any:
    """A document without what is of the moment at which it was made."""
    if isinstance(shown, dict):
        return {name: timeless(value) for name, value in shown.items() if name not in OF_THE_MOMENT}
    return [timeless(value) for value in shown] if isinstance(shown, list) else shown


class TestJson:
    def test_it_is_what_the_commands_print(
        self, url: str, server: RedisServer, client: redis.Redis, run_id: str
    ) -> None:
        names = (("/%2F", 100), ("", 2), ("-silent", 1), ("-x", 1))
        many, few, silent, broken = (Crowd(client, f"{run_id}{name}", n, lease=600) for name, n in names)
        node, path = few.members[0], "/logs/0/stdout.log"
        few.add(Started(epoch=4, size=2, node=node, rank=0, logs={0: path}))
        few.add(Log(epoch=4, size=2, node=node, rank=0, age_ms=1500, path=path, lines="the last lines"))
        client.delete(silent.keys.events)
        client.zadd(silent.keys.leases, dict.fromkeys(silent.members, 1))
        client.hset(broken.keys.run, "epoch", "x")
        ours = [crowd.keys.run_id for crowd in (many, few, silent, broken)]

        def printed(*argv: str) -> Any:
            return run_command(*argv, "--json", "--endpoint", server.url).json

        def served(run: str, query: str = "") -> Any:
            code, _, body = ask(f"{url}api/runs/{urllib.parse.quote(run, safe='')}{query}")
            assert code == 200
            return json.loads(body)

        listed = json.loads(ask(f"{url}api/runs")[2])
        assert [run["run"] for run in listed["runs"]] == sorted(run["run"] for run in listed["runs"])
        expected = [timeless(run) for run in printed("list")["runs"] if run["run"] in ours]
        assert [timeless(run) for run in listed["runs"] if run["run"] in ours] == expected
        assert [run["phase"] for run in expected] == ["running", "dead", "corrupt", "running"]
        for run in ours[:3]:
            assert timeless(served(run)) == timeless(printed("status", run))
            assert served(run, "?logs") == printed("logs", run)
            for one in printed("status", run)["nodes"][:3]:
                assert timeless(served(run, f"?node={one['id']}")) == timeless({"version": 1, **one})
            for event in printed("events", run)["events"][-20:]:
                assert served(run, f"?event={event['id']}") == {"version": 1, **event}
        assert served(few.keys.run_id, "?logs")["failed"]["tail"] == "the last lines"
        assert [log["path"] for log in served(few.keys.run_id, "?logs")["logs"]] == [path]
        assert served(silent.keys.run_id, "?logs")["failure"]["lines"] == [["cause", SILENT]]
        code, _, body = ask(f"{url}api/runs/{broken.keys.run_id}")
        assert (code, broken.keys.run in json.loads(body)["error"]) == (503, True)

    def test_what_is_not_there(self, url: str, client: redis.Redis, run_id: str) -> None:
        Crowd(client, run_id, 1)
        for missing, said in {
            "api/runs/no-such-run": "has no run 'no-such-run'",
            "api/runs/bad*id": "'bad*id'",
            f"api/runs/{run_id}?node=x": "no such node or event",
            f"api/runs/{run_id}?event=1-0": "no such node or event",
            "live?run=bad*id": "'bad*id'",
            "page/none.js": "Not Found",
            "none": "Not Found",
        }.items():
            code, headers, body = ask(url + missing)
            assert (code, headers["content-type"]) == (404, "application/json")
            assert said in json.loads(body)["error"]

    def test_redis_is_away(self, own_server: RedisServer) -> None:
        with dashboard(f"--endpoint={own_server.url}") as (url, _):
            assert ask(f"{url}api/runs")[0] == 200
            own_server.kill()
            until(lambda: ask(f"{url}api/runs")[0] == 503, "it says so")
            assert ask(url)[0] == 200
            own_server.start()
            until(lambda: ask(f"{url}api/runs")[0] == 200, "it is back")


def test_it_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    done = run_command("dashboard")
    assert (done.code, done.err) == (
        2,
        "redelastic dashboard: the dashboard needs an extra: pip install 'redelastic[dashboard]'.\n",
    )


def test_it_ends_at_once_while_somebody_looks(server: RedisServer) -> None:
    with dashboard("--endpoint", server.url) as (url, process):
        stream = listen(f"{url}live")
        assert stream.readline() == b"event: document\n"
        assert process.interrupt() == 0
        assert process.err == ""
        stream.close()
