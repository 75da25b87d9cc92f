"""Exceptions from signal handlers, wherever they interrupt a connect or a call: no later call meets what they left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from redelastic.redis.server import RedisServer

CAMPAIGN = """
import random, signal, sys
from redelastic import RedisStore
from redelastic.redis.connection import Connection

class Interrupt(Exception): pass
class Late(TimeoutError): pass  # redis-py takes it for a lost connection

def handler(*_):
    if armed:
        raise random.choice((Interrupt, Late))

url, wanted = sys.argv[1], int(sys.argv[2])
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

opened = []
connect()
interrupts = tries = 0
while interrupts < wanted:
    tries += 1
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
print(interrupts, "interrupts")
"""


@pytest.mark.fault(
    "a signal handler raises while a process connects to Redis or calls it",
    "a connection that is not set up to its end, or has a reply to come, is used by nobody",
)
@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(2400)])])
def test_no_call_meets_what_an_interrupt_left(own_server: RedisServer, count: int) -> None:
    program = [sys.executable, "-c", CAMPAIGN, own_server.url.removesuffix("/0"), str(count)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60 + count / 50)
    assert (done.returncode, done.stdout) == (0, f"{count} interrupts\n"), done.stderr
