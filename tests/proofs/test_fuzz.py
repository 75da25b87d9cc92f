"""Arbitrary values in Redis, options and environment: decoders accept them or raise redelastic's own errors.

`REDELASTIC_FUZZ=1000000 pytest tests/proofs/test_fuzz*.py` makes that many inputs in all,
`REDELASTIC_FUZZ_SEED=…` makes different ones. A failure names the call that makes and tries its input again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError, RendezvousStateError

from redelastic import RedisRendezvousBackend
from redelastic.cli.output import moment
from redelastic.monitoring.control import UnknownRunError
from redelastic.monitoring.history import STATES, replay
from redelastic.monitoring.records import decode_status
from redelastic.monitoring.report import describe
from redelastic.redis.connection import Connection, text
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.errors import CorruptStateError, UnreachableError
from redelastic.redis.keys import RunKeys, check_key_part
from redelastic.rendezvous import init_method
from redelastic.rendezvous.candidate import Candidate
from redelastic.rendezvous.keeper import Keeper
from redelastic.rendezvous.node import Node
from redelastic.rendezvous.replies import Complete
from redelastic.rendezvous.settings import Settings, parameters_from_url
from redelastic.rendezvous.view import View
from tests.support.fuzzing import (
    INPUTS,
    Replies,
    control_of,
    hostile_event,
    hostile_history,
    hostile_run,
    pairs,
    status_text,
    try_all,
)
from tests.support.hostile import NODES, Dice

pytestmark = pytest.mark.timeout(3600 if "REDELASTIC_FUZZ" in os.environ else 120)

CANARY: Final = "s3cr3t-c4n4ry"  # a password that no message may contain
URLS: Final = (
    f"redis://user:{CANARY}@localhost:6379/0",
    f"redis+sentinel://u:{CANARY}@a:1,b:2/mymaster/3?sentinel_password=other&sentinel_username=u",
    f"rediss+cluster://:{CANARY}@[::1]:6379,h.example:1",
    f"unix://u:{CANARY}@/tmp/redis.sock?db=2",
    "localhost:6379",
    "",
)
QUERY: Final = (
    "run_id=job&min_nodes=1&max_nodes=3&last_call_timeout=5&ttl=900&key_prefix=p&topology=rack1&timeout=3&rank=0"
)


# -- names, endpoints, settings


def fuzz_key_parts(dice: Dice) -> None:
    name = dice.spoil("job-1") if dice.random() < 0.8 else dice.value(1)
    with contextlib.suppress(ValueError, TypeError):
        run = RunKeys(check_key_part("run id", name), dice.spoil("redelastic"))
        store = run.store(dice.spoil("default"))
        for key in (run.run, run.status(name), store.data, store.stream(dice.raw()).decode(errors="replace")):
            assert key.startswith(f"{run.prefix}:{{{run.run_id}}}:")
        assert not set("*?[]^\\{} \n") & set(run.prefix + run.run_id)  # one hash tag, and no wider ACL pattern


def without_secrets(error: BaseException) -> None:
    """No message contains the canary, unless the input contains only a part of it."""
    assert CANARY not in f"{error!s}{error!r}", error


def fuzz_endpoints(dice: Dice) -> None:
    given = dice.choice(URLS)
    login, at, rest = given.rpartition("@")
    text = login + at + dice.spoil(rest) if dice.random() < 0.5 else dice.spoil(given)
    try:
        endpoint = parse_endpoint(text)
    except ValueError as e:
        if text.startswith(login + at) and text.count(CANARY) == 1:  # the password was not copied elsewhere
            without_secrets(e)
    else:
        shown = f"{endpoint}{endpoint!r}"
        assert CANARY not in shown or endpoint.password != CANARY or text.count(CANARY) > 1


def fuzz_settings(dice: Dice) -> None:
    url = dice.choice(URLS[:4]).partition("?")[0] + "?" + dice.spoil(QUERY)
    try:
        Settings.from_parameters(parameters_from_url(url))
        params = RendezvousParameters("redis", "", dice.word(), 1, 2, **{dice.choice(SETTINGS): dice.value(1)})
        Settings.from_parameters(params)
    except (ValueError, TypeError) as e:
        without_secrets(e)


SETTINGS: Final = [field.name for field in dataclasses.fields(Settings)][4:]


def fuzz_init_method(dice: Dice) -> None:
    url = dice.choice(URLS[:4]).partition("?")[0] + "?" + dice.spoil(QUERY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "open", refuse)
        try:
            next(init_method._rendezvous(url, timedelta(seconds=1)))
        except (ValueError, TypeError, RendezvousConnectionError) as e:
            without_secrets(e)


def refuse(*_: Any, **__: Any) -> Any:
    raise UnreachableError("not here")


# -- what the run's keys hold


def fuzz_node_status(dice: Dice) -> None:
    status = decode_status("a-1-0123456789ab", status_text(dice))
    assert all(isinstance(status[name], str) for name in ("name", "host", "state"))


def fuzz_run_states(dice: Dice) -> None:
    with contextlib.suppress(UnknownRunError, CorruptStateError):
        run = hostile_run(dice)
        assert run.phase in {"stopped", "closed", "running", "regrouping", "forming", "empty"}
        assert isinstance(run.waits_for, str)
        json.dumps(describe(run, [hostile_event(dice)], 1.7e9), allow_nan=False)


def fuzz_events(dice: Dice) -> None:
    entries = [
        [f"{n}-0".encode(), pairs(dice, {"event": "lost", "node": NODES[0], "epoch": "2", "size": "2"})]
        for n in range(3)
    ]
    for event in control_of(entries).events():
        assert 0 <= event.epoch < 10**18
        moment(event.time, full=True)
    failures = control_of(dice.raw()).failures("a")
    assert isinstance(failures, int)


def fuzz_histories(dice: Dice) -> None:
    events = hostile_history(dice)
    history = replay(events, dice.choice((None, events[-1].time + 5)))
    assert set(history.seconds) == set(STATES)
    for part in (history, history.since(events[len(events) // 2].time)):
        for span in (span for node in part.nodes for span in node.spans):
            assert part.start <= span.start <= span.end <= part.end
    json.dumps(dataclasses.asdict(history), allow_nan=False)


# -- a member


def candidate(*replies: Any) -> tuple[Node, Keeper, Candidate]:
    settings = Settings(run_id="job", min_nodes=1, max_nodes=3)
    node = Node(cast("Connection", Replies(*replies)), RunKeys("job"), settings, "127.0.0.1")
    keeper = Keeper(node)
    return node, keeper, Candidate(keeper, 1, 0.0)


def member(*replies: Any) -> tuple[Node, Keeper]:
    """A member of round 2 without its thread, which would consume these replies."""
    node, keeper, joining = candidate(*replies)
    node.watch.update(View.enter, joining.round_from(Complete(2, 0, 2, "host 1", 1, 0, "")))
    return node, keeper


def fuzz_wake_ups(dice: Dice) -> None:
    """A node accepts any entry of the stream: an error here would end its keeper, or its rendezvous."""
    node, keeper = member()
    entries = []
    for i in range(3):
        change = {
            "event": dice.choice(("broken", "closed", "stopped", "drain", "complete", "roll_call", "answered")),
            "epoch": "2",
            "node": node.id,
        }
        change |= {"reason": "why", "waiting": "1", "lost": "1", "timeout": "30000", "called_at": "1"}
        entries.append(
            (f"{i}-0", {k: dice.text() if dice.random() < 0.3 else v for k, v in change.items() if dice.random() < 0.9})
        )
    keeper.hear(entries)
    assert node.view.nodes_waiting >= 0
    assert all(drain.timeout >= 0 and math.isfinite(drain.timeout) for drain in node.view.drains)


def fuzz_replies(dice: Dice) -> None:
    """Replies have the scripts' shape; their texts are whatever the keys hold."""
    drain = dice.choice((b"", b"30000 by x", dice.raw(), dice.raw() + b" x"))
    beat = [
        dice.choice((b"member", b"fenced", b"unknown")),
        2,
        dice.raw(),
        dice.randrange(9),
        dice.raw(),
        -1,
        dice.randrange(2),
        drain,
        dice.choice((0, 1)),
    ]
    node, keeper = member(beat, [dice.raw(), 0, 0], [dice.choice((None, dice.raw())), None])
    keeper.beat()
    assert all(math.isfinite(each.timeout) for each in node.view.drains)
    with contextlib.suppress(RendezvousError):
        node.watch.update(View.apply_closing, dice.raw(), stop=dice.random() < 0.5)
        node.raise_closed(spare=dice.random() < 0.5)
    with contextlib.suppress(CorruptStateError):
        master = text(dice.choice((b"", b"host ", b"[::1] ", dice.raw())) + dice.raw())
        _, _, joining = candidate()
        assert 0 < joining.round_from(Complete(3, 0, 2, master, 1, 0, "")).port < 2**16


def fuzz_backend(dice: Dice) -> None:
    connection = cast("Connection", Replies([dice.choice((None, b"state")), dice.choice((None, dice.raw()))]))
    with contextlib.suppress(RendezvousStateError):
        found = RedisRendezvousBackend.__new__(RedisRendezvousBackend)
        found.connection, found.keys = connection, RunKeys("job")
        found.get_state()


PURE: Final[dict[Callable[[Dice], None], int]] = {  # and their share of the inputs
    fuzz_key_parts: 10,
    fuzz_endpoints: 10,
    fuzz_settings: 6,
    fuzz_init_method: 2,
    fuzz_node_status: 10,
    fuzz_run_states: 6,
    fuzz_events: 8,
    fuzz_histories: 6,
    fuzz_wake_ups: 8,
    fuzz_replies: 8,
    fuzz_backend: 8,
}


@pytest.mark.fault("hostile values in Redis, options and requests", "only redelastic's own errors are raised")
@pytest.mark.parametrize("target", PURE, ids=lambda target: target.__name__[5:])
def test_only_redelastics_own_errors_are_raised(target: Callable[[Dice], None], measured: Callable[..., None]) -> None:
    count = max(20, INPUTS * PURE[target] // 110)
    try_all(target, count)
    measured("inputs", count, "")
