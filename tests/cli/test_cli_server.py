"""`redelastic server`: real processes, ended by Ctrl-C, SIGTERM and SIGKILL; no server outlives the command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from tests.support.servers import reserved_port

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files of the command; its name is short, since a unix socket's path has 107 bytes."""
    made = tempfile.mkdtemp(prefix="r-")
    yield Path(made)
    shutil.rmtree(made)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts the command; its stdout and stderr are pipes."""
    started: list[subprocess.Popen[str]] = []

    def popen(*argv: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "redelastic", "server", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder), **variables},
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    return line.rstrip("\n")


def ping(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=10) as client:
        return bool(client.ping())


def gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(60)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_a_signal_ends_it(start: Start, folder: Path, number: signal.Signals) -> None:
    process = start("--json")
    server = json.loads(first_line(process))
    assert server.keys() == {"endpoint", "pid", "url"}
    assert ping(server["url"])
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "stopped" in err
    assert gone(server["pid"])
    assert not list(folder.iterdir())


def test_a_shell_accepts_the_printed_line(start: Start) -> None:
    for argv in ((), ("--unix-socket",)):
        process = start(*argv)
        line = first_line(process)
        shell = subprocess.run(
            ["sh", "-c", f'{line}\nprintf %s "$REDELASTIC_REDIS_URL"'], capture_output=True, text=True, check=True
        )
        assert ping(shell.stdout)
        process.terminate()
        out, err = process.communicate(timeout=60)
        assert out == ""
        assert shell.stdout.split("@")[0].rpartition(":")[2] not in err, "the password is printed once, on stdout"


def test_a_server_that_dies_ends_the_command(start: Start) -> None:
    process = start("--json")
    os.kill(json.loads(first_line(process))["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "exited by itself" in err


def test_the_url_file_is_private_and_removed_with_the_server(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("of before")
    file.chmod(0o644)
    process = start("--url-file", str(file), "--json")
    server = json.loads(first_line(process))
    assert server.keys() == {"endpoint", "pid", "url_file"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    url = file.read_text().strip()
    assert ping(url)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert url.split("@")[0] not in out + err
    assert not list(tmp_path.iterdir())


def test_the_port_asked_for_and_data_that_outlive_the_server(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with reserved_port() as port:
        process = start("--port", str(port), "--data-dir", str(data), "--json")
        server = json.loads(first_line(process))
    assert server["endpoint"] == f"127.0.0.1:{port}"
    with redis.Redis.from_url(server["url"]) as client:
        client.set("key", "value")
    made = [data, *data.rglob("*")]
    assert len(made) > 1
    assert [path for path in made if path.stat().st_mode & 0o077] == [], "only this user can read the data"
    process.terminate()
    assert process.wait(60) == 0
    again = start("--data-dir", str(data), "--json")
    with redis.Redis.from_url(json.loads(first_line(again))["url"]) as client:
        deadline = time.monotonic() + 20
        while client.info("persistence")["loading"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.get("key") == b"value"


@pytest.mark.parametrize(
    ("argv", "variables", "code", "said"),
    [
        (["--port", "70000"], {}, 2, "from 1 to 65,535"),
        (["--port", "6390", "--unix-socket"], {}, 2, "not allowed with"),
        (["--url-file", "/no-such-folder/url"], {}, 2, "name a file"),
        (["--data-dir", "/dev/null/data"], {}, 1, "/dev/null/data"),
        ([], {"REDELASTIC_REDIS_BINARY": "/no-such-binary"}, 1, "/no-such-binary"),
    ],
)
def test_impossible_options_give_one_line(
    start: Start, argv: list[str], variables: dict[str, str], code: int, said: str
) -> None:
    process = start(*argv, **variables)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert err.count("\n") == 1
    assert said in err


def test_a_port_that_is_taken(start: Start) -> None:
    first = start("--json")
    port = json.loads(first_line(first))["endpoint"].rpartition(":")[2]
    second = start("--port", port)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 1
    assert port in err
    assert err.count("\n") == 1
