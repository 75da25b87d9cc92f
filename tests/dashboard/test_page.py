"""The dashboard's page in a real browser: what people read off it while real nodes come, fail and go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from redelastic.monitoring.events import Lost, Stopped
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.agent_job import AWARE, DRAINED, STOPPED, AgentJob
from tests.support.browsing import Browser, dashboard
from tests.support.commands import until
from tests.support.crowds import Crowd
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
SCRIPT = "<script>document.title='taken'</script><img/src=x/onerror=alert(1)>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A browser in which no page has complained when the test is over."""
    yield chromium
    chromium.open("about:blank")
    assert chromium.console_errors() == []


@pytest.mark.fault("nodes are killed, drained and join", "the dashboard shows each as it happens")
def test_a_job_is_read_off_the_page(server: RedisServer, tmp_path: Path, browser: Browser) -> None:
    """Three real nodes: one is killed, one joins, one is drained."""
    with dashboard(f"--endpoint={server.url}") as (url, _), AgentJob(server, tmp_path, "1:3") as job:
        job.begin("a", "b", "c")
        epoch = job.wait_round("abc")
        browser.open(url)
        browser.until(".runs", lambda text: job.run_id in text and "running" in text)
        link = next(a for a in browser.find_all(".runs a") if a.text == job.run_id)
        link.click()
        browser.until(".verdict", "running")
        browser.until(".head .what", str(AWARE))
        until(lambda: browser.rows() == dict.fromkeys("abc", "running"), "three nodes run", 60)
        browser.until(".figures", lambda text: re.search(r"Round\n1\n.*Step\n[0-9]+\n", text, re.DOTALL))
        assert browser.run("return document.querySelectorAll('.lanes .lane-name').length") == 3

        job.nodes["c"].kill()
        browser.until(".events", lambda text: re.search(r"lost\nc-.*(did not answer|lost its lease)", text))
        epoch = job.wait_round("ab", epoch)
        until(lambda: browser.rows() == dict.fromkeys("ab", "running"), "c is gone", 60)
        browser.until(".figures", lambda text: "2 of 3" in text and "lost" in text)
        assert browser.run("return document.querySelectorAll('.lanes .mark.cross').length") == 1

        job.begin("d")
        epoch = job.wait_round("abd", epoch)
        until(lambda: browser.rows() == dict.fromkeys("abd", "running"), "d has joined", 60)

        job.tell("slow-b")
        job.nodes["b"].terminate()
        browser.until(".events", lambda text: re.search(r"drain\nb-.*SIGTERM", text))
        assert job.wait_end("b") == DRAINED
        job.wait_round("ad", epoch)
        until(lambda: browser.rows() == dict.fromkeys("ad", "running"), "b has left", 60)
        ettr = browser.until(".figures", "Effective training time")
        assert re.search(r"Effective training time\n[0-9.]+ %\nof ", ettr)

        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("d") == 0
        browser.until(".verdict", "closed")
        browser.until("[aria-label=Nodes] .none", "No nodes in the run.")


def test_a_person_acts_and_follows_links(server: RedisServer, tmp_path: Path, browser: Browser) -> None:
    token = "a-token-of-enough-characters"
    (tmp_path / "token").write_text(token)
    links = ("--link=Graphs=https://graphs.example/d?run={run}&from={start}", "--link=Log=https://logs.example/{host}")
    options = (f"--token-file={tmp_path / 'token'}", "--allow-actions", *links)
    with dashboard(f"--endpoint={server.url}", *options) as (url, _), AgentJob(server, tmp_path, "1:2") as job:
        job.begin("a", "b", options=("--share-logs",))
        job.wait_round("ab")
        browser.open(f"{url}runs/{job.run_id}?token={token}")
        browser.until(".verdict", "running")
        hrefs = "return [...document.querySelectorAll('.head .links a')].map((link) => link.href)"
        [graphs] = browser.run(hrefs)
        assert re.fullmatch(rf"https://graphs\.example/d\?run={job.run_id}&from=1[0-9]{{12}}", graphs)

        until(lambda: browser.rows() == dict.fromkeys("ab", "running"), "both run", 60)
        browser.click("b", ".node-name")
        browser.until(".panel .tools", "Log")
        browser.click(browser.until(".tail button", "Rank"), ".tail button")
        with (tmp_path / "b.err").open("a") as log:
            log.write("step 7 of the worker\n")
        browser.until(".tail pre", "step 7 of the worker")
        browser.click("Drain…", ".panel button")
        browser.until(".ask", f"Drain {job.control.find('b').name}?")
        browser.click("Drain", ".ask button")
        assert browser.text(".said") == "", "it asks for a name first"
        browser.find("#action-name").send_keys("Ada")
        browser.click("Drain", ".ask button")
        browser.until(".said", "was asked to drain")
        browser.click("Done", ".ask button")
        assert job.wait_end("b") == DRAINED
        browser.until(".events", lambda text: re.search("by Ada at [0-9.:]+, on the dashboard", text))

        browser.click("Stop…", ".head button")
        browser.until(".ask", f"Stop {job.run_id}?")
        assert browser.run("return document.getElementById('action-name').value") == "Ada", "it remembers the name"
        browser.click("Cancel", ".ask button")
        browser.click("Save…", ".head button")
        browser.run("for (const name of ['.do', '.quiet']) document.querySelector('.ask ' + name).click()")
        # It is cancelled before its answer comes, which is then not shown where the dialog asks for something else.
        browser.click("Stop…", ".head button")
        browser.find("#action-reason").send_keys("enough")
        browser.click("Stop", ".ask button")
        browser.until(".said", "its nodes end their workers")
        assert job.wait_end("a") == STOPPED
        browser.click("Done", ".ask button")
        browser.until(".verdict", "stopped")
        browser.until(".verdict-why", "enough")


def test_curves_of_a_job(client: redis.Redis, server: RedisServer, browser: Browser, run_id: str) -> None:
    Crowd(client, run_id, 2)
    now = int(client.time()[0] // 60)
    points = {minute: f"step={100 * minute}/{60_000 * minute} idle=0.6/1 gpu=180/2" for minute in range(now - 90, now)}
    client.hset(RunKeys(run_id).curves, mapping={str(minute): point for minute, point in points.items()})
    with dashboard(f"--endpoint={server.url}") as (url, _):
        browser.open(f"{url}runs/{run_id}")
        browser.until(".charts", "Steps per second")
        titles = "return [...document.querySelectorAll('.chart:not([hidden]) h3')].map((title) => title.textContent)"
        assert browser.run(titles) == ["Steps per second1.67", "Longest without a step0.6 s", "Use of the GPUs90.0 %"]
        said = browser.run("return document.querySelector('.chart svg').getAttribute('aria-label')")
        assert said == "Steps per second: from 1.67 to 1.67, now 1.67"
        browser.hover(".chart svg")
        browser.until(".chart .tip", ": 1.67")


def test_a_run_is_found_among_many(client: redis.Redis, server: RedisServer, browser: Browser, run_id: str) -> None:
    for i in range(12):
        Crowd(client, f"{run_id}-{i}", 1 + i, gpus=0)

    def names() -> list[str]:
        script = "return [...document.querySelectorAll('.runs .name a')].map((link) => link.textContent)"
        return [name for name in browser.run(script) if name.startswith(run_id)]  # the server has other runs

    with dashboard(f"--endpoint={server.url}") as (url, _):
        browser.open(url)
        until(lambda: len(names()) == 12, "all are listed", 60)
        browser.click("Nodes", ".runs th button")
        assert names() == [f"{run_id}-{i}" for i in range(11, -1, -1)], "the largest comes first"
        browser.find("input[type=search]").send_keys(f"{run_id}-1")
        until(lambda: names() == [f"{run_id}-{i}" for i in (11, 10, 1)], "it is found by its name")


def test_the_time_of_a_run_is_its_own(client: redis.Redis, server: RedisServer, browser: Browser, run_id: str) -> None:
    """Both runs began two hours ago; one of them ended after 96 minutes."""
    ended, crowd = (Crowd(client, f"{run_id}{name}", 2, age=7200, lease=600) for name in ("-ended", ""))
    client.delete(ended.keys.members, ended.keys.ranks, ended.keys.leases)
    client.hset(ended.keys.run, mapping={"closed": Stopped(cause="asked").as_cause(), "stop": 1})
    with dashboard(f"--endpoint={server.url}") as (url, _):
        browser.open(f"{url}runs/{ended.keys.run_id}")
        figures = browser.until(".figures", "Effective training time")
        assert re.search(r"Effective training time\n[0-9.]+ %\nof 9[67] min", figures), figures
        assert re.fullmatch(r"started at .*[0-9:]{8}, lasted 9[67] min", browser.text(".head .when"))
        browser.open(f"{url}runs/{crowd.keys.run_id}")
        assert re.search(r"\nof 2\.0 h", browser.until(".figures", "Effective training time"))
        assert re.fullmatch(r"started at .*[0-9:]{8}, 2\.0 h ago", browser.text(".head .when"))


def test_tile_and_legend_are_of_one_moment(
    client: redis.Redis, server: RedisServer, browser: Browser, run_id: str
) -> None:
    """The nodes were last heard of a minute ago: neither counts what they may have done since."""
    crowd = Crowd(client, run_id, 2, age=600, lease=600)
    for node in crowd.members:
        client.zincrby(crowd.keys.leases, -60_000, node)
    with dashboard(f"--endpoint={server.url}") as (url, _):
        browser.open(f"{url}runs/{run_id}")
        browser.until(".legend", "training")

        def shares() -> list[float]:
            found = (browser.text(".figures"), browser.text(".legend"))
            patterns = (r"Effective training time\n([0-9.]+) %", r"training\s+([0-9.]+) %")
            return [float(match[1]) for match in map(re.search, patterns, found) if match]

        tile, legend = shares()
        assert abs(tile - legend) < 0.15, "what differs is the rounding"
        crowd.beat()  # it is too little for the lanes to be drawn again
        until(lambda: shares()[0] > tile + 0.3, "they are heard of again", 60)
        tile, legend = shares()
        assert abs(tile - legend) < 0.15


def test_names_from_redis_stay_text(server: RedisServer, browser: Browser, new_node: NodeFactory) -> None:
    node = new_node(1, 1, node_name=SCRIPT)
    node.next_rendezvous()
    with dashboard(f"--endpoint={server.url}") as (url, _):
        browser.open(f"{url}runs/{node.node.run_id}")
        until(lambda: browser.rows() == {SCRIPT: "running"}, "the name is shown as it is", 60)
        browser.until(".lanes", "<script>")
        assert SCRIPT in browser.until(".events", "completed")
        assert browser.driver.title == f"{node.node.run_id} · redelastic"
        assert not browser.find_all("main img, main script")
        browser.find(".node-name").click()
        assert SCRIPT in browser.until(".panel", node.node.id)


@pytest.mark.fault("Redis goes away and comes back", "the dashboard says so, keeps what it knew, and goes on")
def test_redis_away_and_back(
    own_server: RedisServer, browser: Browser, new_node: NodeFactory, pool: ThreadPoolExecutor
) -> None:
    nodes = [new_node(2, 2, url=own_server.url, node_name=name) for name in "ab"]
    join_all(pool, *nodes)
    run_id = nodes[0].node.run_id
    with dashboard(f"--endpoint={own_server.url}") as (url, _):
        browser.open(f"{url}runs/{run_id}")
        until(lambda: browser.rows() == dict.fromkeys("ab", "running"), "both run", 60)
        browser.until(".live", "Live")
        own_server.kill()
        browser.until(".live", "Away")
        assert browser.text(".banner").startswith("Redis is away: ")
        assert set(browser.rows()) == {"a", "b"}
        own_server.start()
        browser.until(".live", "Live")
        assert browser.text(".banner") == ""
        until(lambda: browser.rows() == dict.fromkeys("ab", "running"), "they have told Redis of themselves", 60)


def test_the_page_outlives_its_server(server: RedisServer, browser: Browser, new_node: NodeFactory) -> None:
    node = new_node(1, 1, node_name="a")
    node.next_rendezvous()
    with dashboard(f"--endpoint={server.url}") as (url, process):
        browser.open(f"{url}runs/{node.node.run_id}")
        until(lambda: browser.rows() == {"a": "running"}, "it is shown", 60)
        port = url.rstrip("/").rpartition(":")[2]
        assert process.interrupt() == 0
        browser.until(".banner", "The dashboard's server does not respond.")
        assert browser.rows() == {"a": "running"}
    with dashboard(f"--endpoint={server.url}", f"--port={port}"):
        browser.until(".live", "Live")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_thousand_nodes(client: redis.Redis, server: RedisServer, browser: Browser, run_id: str, width: int) -> None:
    crowd = Crowd(client, run_id, 1000)
    with dashboard(f"--endpoint={server.url}") as (url, _):
        browser.open(f"{url}runs/{run_id}", width)
        browser.until("[aria-label=Nodes] h2", "1,000 nodes")
        assert 16 < len(browser.rows()) < 60, "only rows in sight exist"
        browser.run("document.querySelector('.scroller').scrollTop = 1e6")
        until(lambda: "node-0999" in browser.rows(), "the last one is reached")
        crowd.beat()
        browser.until(".figures", f"{crowd.step:,}")
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        victim = crowd.members[700]
        browser.find("input[type=search]").send_keys("node-0700")
        until(lambda: list(browser.rows()) == ["node-0700"], "it is found by its name")
        browser.find(".node-name").click()
        shown = browser.until(".panel", "NVIDIA H100")
        assert victim in shown


def test_nodes_that_are_lost_together_are_each_seen(
    client: redis.Redis, server: RedisServer, browser: Browser, run_id: str
) -> None:
    crowd = Crowd(client, run_id, 100, gpus=0)
    lost = crowd.members[20:84]
    crowd.add(Lost(epoch=4, size=100, node=lost[0], nodes=tuple(lost), cause="lease", silent_ms=6000))
    with dashboard(f"--endpoint={server.url}") as (url, _):
        browser.open(f"{url}runs/{run_id}")
        shown = browser.until(".events", "and 63 more nodes lost its lease after 6.0 s")
        assert "node-0020" in shown
        browser.until(".figures", lambda text: re.search(r"Last fault\nlost\nnode-0020-[0-9]+ and 63 more nodes", text))
        marks = "return [...document.querySelectorAll('.lanes .mark.cross title')].map((title) => title.textContent)"
        seen = {title.partition(":")[0] for title in browser.run(marks) if "lost its lease" in title}
        assert {node.rpartition("-")[0] for node in lost} <= seen
        browser.find(".events details summary").click()
        assert browser.until(".events details[open] pre", lost[-1]).split("\n") == lost


def test_a_run_that_is_not_there(server: RedisServer, browser: Browser, new_node: NodeFactory, run_id: str) -> None:
    with dashboard(f"--endpoint={server.url}") as (url, _):
        browser.open(f"{url}runs/{run_id}")
        browser.until("main", f"has no run '{run_id}'")
        assert browser.text("h2").strip() == ""
        new_node(1, 1, node_name="a").next_rendezvous()
        until(lambda: browser.rows() == {"a": "running"}, "it is shown as soon as it is there", 60)
        browser.open(f"{url}runs/bad*id")
        browser.until(".banner", "The dashboard's server refuses this page")
        [shown] = browser.console_errors()
        assert re.search(r"/live\?run=bad\*id .* 404 ", shown)
