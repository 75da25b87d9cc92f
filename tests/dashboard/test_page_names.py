"""Runs in which anything is called as anything is in JavaScript, at any time: what people and supervisors see."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from redelastic.dashboard.standalone import PAGE
from redelastic.host.health_endpoint import HealthEndpoint
from redelastic.monitoring.events import KINDS
from redelastic.monitoring.history import STATES
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.browsing import Browser, dashboard
from tests.support.commands import run_command, until
from tests.support.fuzzing import hostile_entry, plant, spoil_keys
from tests.support.hostile import FIELDS, LARGE_IDS, Dice

NAMES: Final = ("constructor", "__proto__", "toString", "hasOwnProperty", "valueOf", "5")
MADE_UP: Final = 40  # runs
NOW: Final = 1_700_000_000_000  # in ms
# What JavaScript writes where it has found something else than it looked for.
NOT_FOUND: Final = re.compile(r"native code|\[object|NaN|Infinity|undefined|Invalid Date")
# Points at, opens and sorts whatever there is, and returns the page with what it showed of each node.
TRY_ALL: Final = """
const done = arguments[0];
const shown = [];
for (const lanes of document.querySelectorAll("svg.lanes")) {
  const at = lanes.getBoundingClientRect();
  for (let x = 0; x < at.width; x += 9) for (let y = 0; y < at.height; y += 9)
    lanes.dispatchEvent(new PointerEvent("pointermove", { clientX: at.x + x, clientY: at.y + y }));
}
for (const one of document.querySelectorAll("main button:not(.node-name, dialog *), summary")) one.click();
for (const node of document.querySelectorAll(".node-name")) {
  node.click();
  const panel = document.querySelector(".panel-body");
  while (!panel.textContent) await new Promise(requestAnimationFrame);
  shown.push(panel.innerHTML);
  document.querySelector("dialog").close();
  await new Promise(requestAnimationFrame);
}
const page = document.documentElement.cloneNode(true);
for (const code of page.querySelectorAll("script, style")) code.remove();
done(page.outerHTML + shown.join());
"""


def test_the_page_knows_every_state_of_a_node() -> None:
    script, style = ((PAGE / name).read_text() for name in ("timeline.js", "style.css"))
    assert f"const STATES = {json.dumps(STATES)};" in script
    assert [state for state in STATES if f".{state} {{ fill: var(--{state})" not in style] == []


def test_the_page_knows_what_is_a_fault() -> None:
    script = (PAGE / "dom.js").read_text()
    kinds = [name for name, kind in KINDS.items() if kind.fault]
    assert [kind for kind in kinds if f'{kind}: ["bad", ' not in script] == []
    assert [kind for kind in ("closed", "stopped", "left") if f'{kind}: ["calm", ' not in script] == []


def status_of(name: str) -> dict[str, Any]:
    """A node's status with this name in each field."""
    fields = dict.fromkeys(FIELDS, name)
    return fields | {"run_id": name, "xids": {name: 1}, "workers": [fields], "gpus": [fields]}


def entries_of(name: str) -> Iterator[dict[str, str]]:
    """Events of each kind, and of one called so, with this name where a node's is, and in each field."""
    node = {"node": name, "epoch": "1", "size": "1", "members": name, "rank": "0"}
    for kind in (*KINDS, name):
        yield {**node, "event": kind}
        yield dict.fromkeys(KINDS[kind].__dataclass_fields__ if kind in KINDS else FIELDS, name) | {"event": kind}


def call_all(client: redis.Redis, keys: RunKeys, name: str) -> None:
    """Have a run, its new member, its events, and what broke it be called so."""
    plant(client, keys)
    client.hset(keys.run, mapping={"broken": json.dumps([name, name, name, name]), f"draining {name}": f"1 {name}"})
    client.hset(keys.failures, name, 1)
    client.zadd(keys.ranks, {name: 2})
    client.zadd(keys.leases, {name: int(client.time()[0]) * 1000 + 60_000})
    client.sadd(keys.members, name)
    client.set(keys.status(name), json.dumps(status_of(name)))


def named_runs(client: redis.Redis) -> Iterator[tuple[RunKeys, str]]:
    """Runs of each name, whose events are of one day, of the years since 1970, and of all years that ids can be of."""
    for name in NAMES:
        failed = {"event": "failed", "node": name, "cause": name}
        one_day = [(f"{NOW + i}-0", entry) for i, entry in enumerate(entries_of(name))]
        for run_id, entries in (
            (name, one_day),
            (f"{name}-since-1970", [("0-1", failed), *one_day]),
            (f"{name}-forever", [*one_day, *((place, failed) for place in LARGE_IDS)]),
        ):
            keys = RunKeys(run_id)
            call_all(client, keys, name)
            for place, entry in entries:
                client.xadd(keys.events, entry, id=place)  # type: ignore[arg-type]
            yield keys, name


def made_up_runs(client: redis.Redis) -> Iterator[RunKeys]:
    """Runs whose keys hold anything."""
    for seed in range(MADE_UP):
        dice, keys = Dice(seed), RunKeys(f"made-up-{seed}")
        plant(client, keys)
        with contextlib.suppress(redis.ResponseError):  # of events that come too late
            for place, entry in [hostile_entry(dice) for _ in range(12)]:
                client.xadd(keys.events, entry, id=place)  # type: ignore[arg-type]
        for _ in range(3):
            spoil_keys(dice, client, keys)
        yield keys


def look(browser: Browser, url: str) -> str:
    """Try all that a page has, without a complaint of the browser's; returns what it showed."""
    shown: str = browser.driver.execute_async_script(TRY_ALL)
    assert browser.console_errors() == [], url
    return shown


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.fault(
    "names of JavaScript's own, and ids of the year 600 million, in any field",
    "the dashboard, the timeline's page, status and metrics show them",
)
def test_any_name_and_any_time(own_server: RedisServer, tmp_path: Path) -> None:
    """Each page is drawn, has nothing on it but what is called so, and leaves the browser free for the next one."""
    own = f"--endpoint={own_server.url}"
    with (
        own_server.get_client() as client,
        dashboard(own) as (url, _),
        contextlib.closing(Browser(tmp_path / "profile")) as browser,
    ):
        named = dict(named_runs(client))
        runs = [*named, *made_up_runs(client)]
        file = tmp_path / "run.html"
        for keys in runs:
            run_id, name = keys.run_id, named.get(keys)
            browser.open(f"{url}runs/{quote(run_id)}")
            until(lambda: browser.text("#live") in ("Live", "Away"), f"the page shows {run_id}", 60)
            page, rows = look(browser, run_id), browser.rows()
            done = run_command("timeline", run_id, own, f"--out={file}")
            status, document = run_command("status", run_id, own), run_command("status", run_id, own, "--json")
            assert {done.code, status.code, document.code} <= {0, 1, 3}, (done, status)
            if done.code == 0:
                browser.open(file.as_uri())
                browser.until("h1", run_id)
                page += look(browser, run_id)
            if name is None:
                continue
            assert browser.text("h1") == run_id
            assert (done.code, NOT_FOUND.findall(page)) == (0, []), run_id
            assert name in rows, run_id
            assert name in status.out
            assert name in [node["name"] for node in document.json["nodes"]]
        browser.open(url)
        browser.until(".runs", lambda text: all(keys.run_id in text for keys in runs))
        assert NOT_FOUND.findall(look(browser, url)) == []


class NodeCalled:
    """A node as the health endpoint sees it, whose status has this name everywhere."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stalled(self) -> str:
        return self.name

    unready = stalled

    def status(self) -> Mapping[str, Any]:
        return status_of(self.name)


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_a_label_of_metrics(name: str) -> None:
    endpoint = HealthEndpoint(NodeCalled(name), port=0)
    endpoint.start()
    with contextlib.closing(urllib.request.urlopen(f"http://localhost:{endpoint.port}/metrics", timeout=60)) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    endpoint.stop()
    assert all(family.name.startswith("redelastic_") for family in families)
    labels = {value for family in families for sample in family.samples for value in sample.labels.values()}
    assert name in labels
