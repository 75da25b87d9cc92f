"""Exceptions from signal handlers, wherever they interrupt a connect or a call: no later call meets what they left."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from redelastic.redis.connection import Connection
from redelastic.redis.interrupts import Latch
from redelastic.redis.server import RedisServer
from tests.support.interrupts import THREAD_TIMEOUT, interrupt_everywhere
from tests.support.servers import HOST, wait_until

CAMPAIGN = """
import random, signal, socket, sys, threading, time
import redis
from redelastic import RedisStore
from redelastic.redis.connection import Connection
from redelastic.redis.interrupts import Latch

class Interrupt(Exception): pass
class Late(TimeoutError): pass  # redis-py takes it for a lost connection

def handler(*_):
    if armed:
        raise random.choice((Interrupt, Late))

url, wanted, troubled = sys.argv[1], int(sys.argv[2]), "troubled" in sys.argv
answer, silent = socket.getaddrinfo, False

def look_up(host, *args, **options):
    if silent and host == "localhost" and not options.get("flags", 0) & socket.AI_NUMERICHOST:
        time.sleep(1.5)  # longer than callers wait for it
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")
    return answer(host, *args, **options)

socket.getaddrinfo = look_up
armed = False
signal.signal(signal.SIGALRM, handler)
random.seed(wanted)
for db, word in ((3, "right"), (0, "wrong")):
    with_values = RedisStore(f"{url}/{db}", "r", timeout=20)
    for i in range(20):
        with_values.set(f"k{i}", f"{word}{i}")
    with_values.close()

def right(i):
    return b"right%d" % i

def check(reply, expected):
    if reply != expected:
        raise SystemExit(f"after {interrupts} interrupts a call got {reply!r}, not {expected!r}")

def call(store):
    i, j = random.randrange(20), random.randrange(20)
    match random.randrange(6):
        case 0: check(store.get(f"k{i}"), right(i))
        case 1: check(store.multi_get([f"k{i}", f"k{j}"]), [right(i), right(j)])
        case 2: check(store.check([f"k{i}"]), True)
        case 3: check(store.compare_set(f"k{i}", "none", "of these"), right(i))
        case 4: check(store.set(f"k{i}", right(i)), None)
        case 5: check(connection.call(lambda c: c.hget("redelastic:{r}:store:default", f"k{i}")), right(i))

def connect():
    global store, connection
    connection = Connection.open(f"{url}/3", read_timeout=20)
    store = RedisStore(connection, "r", timeout=20)
    opened.append((store, connection))
    call(store)

def make_trouble():
    global silent
    silent = random.random() < 0.3
    match random.randrange(4):
        case 0: admin.client_kill_filter(_type="normal", skipme=True)
        case 1: admin.execute_command("CLIENT", "PAUSE", 50)

def beat():
    global beats
    while True:
        check(store.check(["k1"]), True)
        beats += 1
        time.sleep(0.01)

opened = []
connect()
interrupts = tries = beats = 0
if troubled:
    admin = redis.Redis.from_url(url.replace("localhost", "127.0.0.1"), socket_timeout=20)
    threading.Thread(target=beat, daemon=True).start()
while interrupts < wanted:
    tries += 1
    if troubled:
        make_trouble()
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00005, 0.003), 0.05)  # again: a destructor may swallow it
        if tries % 3 == 0:
            connect()
        elif tries % 3 == 1:  # the next calls connect
            connection.close()
        while True:
            call(store)
    except (Interrupt, Late):
        armed = False
        interrupts += 1
    call(store)
    while len(opened) > 1:  # a store lives until it is closed, and its connection with it
        for former in opened.pop(0):
            former.close()
signal.setitimer(signal.ITIMER_REAL, 0)
silent, seen = False, beats
while troubled and beats == seen:  # another thread is not held up
    time.sleep(0.01)
print(interrupts, "interrupts")
"""


@pytest.mark.fault(
    "a signal handler raises while a process connects to Redis or calls it",
    "a connection that is not set up to its end, or has a reply to come, is used by nobody",
)
@pytest.mark.parametrize("count", [25, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(2400)])])
def test_no_call_meets_what_an_interrupt_left(own_server: RedisServer, count: int) -> None:
    run_campaign(own_server.url.removesuffix("/0"), str(count), limit=60 + count / 50)


@pytest.mark.parametrize("count", [10, pytest.param(2_000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_nor_if_connections_break_redis_stands_still_and_look_ups_hang(own_server: RedisServer, count: int) -> None:
    url = own_server.url.removesuffix("/0").replace(HOST, "localhost")
    run_campaign(url, str(count), "troubled", limit=60 + count / 2)


def run_campaign(url: str, count: str, *options: str, limit: float) -> None:
    program = [sys.executable, "-c", CAMPAIGN, url, count, *options]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=limit)
    assert (done.returncode, done.stdout) == (0, f"{count} interrupts\n"), done.stderr


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")  # closed by its destructor: nobody else has it
def test_an_interrupt_leaves_no_connection_that_nobody_uses(own_server: RedisServer) -> None:
    with closing(Connection.open(own_server.url)) as connection, own_server.get_client() as admin:

        def call() -> None:
            connection.exchange((b"PING",))
            connection.call(lambda client: client.ping())

        assert interrupt_everywhere(call, lambda: None) > 100, "most of them while it connects"
        assert interrupt_everywhere(call, call) > 20, "with connections that are there"
        wait_until(lambda: len(admin.client_list()) <= 3, "the wire's, redis-py's and this are left")


def test_an_interrupt_of_one_wait_holds_up_no_other() -> None:
    with ThreadPoolExecutor(9) as pool:

        def join_and_set(latch: Latch) -> list[Future[bool]]:
            time.sleep(0.01)  # the wait that is interrupted has begun by then, or there is nothing to see
            others = [pool.submit(latch.wait, 2 * THREAD_TIMEOUT) for _ in range(8)]
            time.sleep(0.01)  # and so have these
            latch.set()
            return others

        def begin() -> tuple[Latch, Future[list[Future[bool]]]]:
            latch = Latch()
            return latch, pool.submit(join_and_set, latch)

        running = begin()

        def check() -> None:
            nonlocal running
            assert all(other.result(THREAD_TIMEOUT) for other in running[1].result(THREAD_TIMEOUT))
            running = begin()

        assert interrupt_everywhere(lambda: running[0].wait(THREAD_TIMEOUT), check) > 3
