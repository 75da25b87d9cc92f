"""What a client in C would bring: ours' requests, sent by a prototype (`store_client.c`) that waits for each reply."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import redis
from redelastic.redis.client import pack

from benchmarks.store_contenders import Servers
from benchmarks.store_script import TTL, VALUE
from redelastic.redis.keys import RunKeys
from redelastic.redis.scripts import STORE_ADD, STORE_SET, Call, Script

IN_C: Final = "a client in C"
NO_COMPILER: Final = "needs cc"
SOURCE: Final = Path(__file__).with_suffix(".c")
FIRST: Final = b"1000000000"  # number of a request; it counts up in place
SCRIPTS: Final[dict[str, Script]] = {"set": STORE_SET, "add": STORE_ADD}


@contextlib.contextmanager
def compiled() -> Iterator[Path | None]:
    """The prototype; None without a compiler."""
    with tempfile.TemporaryDirectory(prefix="redelastic-bench-") as folder:
        program = Path(folder) / "client"
        if shutil.which("cc"):
            subprocess.run(["cc", "-O2", "-o", program, SOURCE], check=True)
        yield program if program.exists() else None


def command(operation: str, name: str, number: int) -> bytes:
    """What RedisStore sends for an operation that it waits for."""
    run = RunKeys("bench")
    store = run.store(name)
    key = f"own-{number}".encode() if operation == "set" else b"shared"
    if operation == "get":
        return pack(("HGET", store.data, key))
    call = Call(SCRIPTS[operation], run.of_store(store), ["", str(TTL)])
    args = [uuid.uuid4().bytes, FIRST, key, b"1" if operation == "add" else VALUE.encode()]
    return call.packed([store.stream(key)], args, whole=False)


def rate_in_c(program: Path, servers: Servers, operation: str, clients: int, seconds: float) -> float:
    """Operations a second, of all clients together; each is a process."""
    parts, name = urlsplit(servers.redis), uuid.uuid4().hex
    login = pack(("AUTH", unquote(parts.password or "")))
    with redis.Redis.from_url(servers.redis) as client:
        for script in SCRIPTS.values():
            client.script_load(script.text)
        client.hset(RunKeys("bench").store(name).data, "shared", "1" if operation == "add" else VALUE)
    with ExitStack() as stack:
        started = []
        for number in range(clients):
            sent = command(operation, name, number)
            arguments = (parts.port, seconds, len(login), len(sent), max(0, sent.find(FIRST)), len(FIRST))
            process = subprocess.Popen(
                [program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdin
            process.stdin.write(login + sent)
            started.append(process)
        for process in started:
            assert process.stdout
            if process.stdout.read(1) != b"+":
                raise RuntimeError(f"a client in C did not connect: status {process.wait(1)}")
        for process in started:
            assert process.stdin
            process.stdin.write(b"!")
        return sum(int(process.communicate(timeout=10 + seconds)[0]) for process in started) / seconds
