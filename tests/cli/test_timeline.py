"""The timeline: the page that shows a run's history, and the command that writes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import redis

from redelastic import cli
from redelastic.dashboard.standalone import page
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Closed, Event, Hung, Lost, Progressed
from redelastic.monitoring.history import History, replay
from redelastic.monitoring.sentences import cause, detail_of
from redelastic.monitoring.wording import short
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.browsing import Browser
from tests.support.nodes import NodeFactory
from tests.support.scenes import HOSTILE, SCENES, START, Story, three_nodes
from tests.support.servers import wait_until


class Parts(HTMLParser):
    """The parts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.policy = ""
        self.texts: dict[str, str] = {}  # of elements, by tag and type
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.links += [value for name, value in attributes.items() if name.endswith(("href", "src"))]
        self._in = f"{tag} {attributes.get('type', '')}".strip()
        if "http-equiv" in attributes:
            self.policy = attributes["content"]

    def handle_data(self, data: str) -> None:
        self.texts[self._in] = self.texts.get(self._in, "") + data

    def handle_endtag(self, tag: str) -> None:
        del tag
        self._in = ""


def hostile() -> History:
    """A run all of whose texts are markup or terminal escapes."""
    story = Story()
    node = f"{HOSTILE}-1-0123456789ab"
    story.join(0, [node])
    story.complete(1, [node], "max_nodes")
    story.add(2, Hung(node=node, message=f"{HOSTILE}\u2028", stacks=f"{HOSTILE}\n{HOSTILE}</script>"))
    story.add(3, Event(event=HOSTILE, node=node))
    story.add(4, Closed(cause="asked", reason=HOSTILE))
    return replay(story.events())


class TestPage:
    def test_it_is_one_file_whose_policy_allows_its_own_parts_and_nothing_else(self) -> None:
        parts = Parts(page("my-job", replay(three_nodes())))
        assert parts.links == []
        assert "default-src 'none'" in parts.policy
        for part in ("script module", "style"):
            digest = base64.b64encode(hashlib.sha256(parts.texts[part].encode()).digest()).decode()
            assert f"{part.split()[0]}-src 'sha256-{digest}';" in parts.policy
        assert not re.search(r"^(import|export) |\bimport\(|fetch\(", parts.texts["script module"], re.MULTILINE)

    def test_nothing_from_redis_becomes_markup(self) -> None:
        text = page(HOSTILE, hostile())
        parts = Parts(text)
        assert parts.tags == Parts(page("my-job", replay(three_nodes()))).tags
        assert parts.links == []
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2028\ud800-\udfff]", text)
        data = json.loads(parts.texts["script application/json"])
        reason = next(event["reason"] for event in data["events"].values() if event["event"] == "hung")
        assert reason.startswith("<script>alert(1)</script>\"'&"), "the reason is shown, as text"

    @pytest.mark.parametrize("scene", ["three", "crowded", "trimmed"])
    def test_the_page_has_the_whole_history(self, scene: str) -> None:
        history = replay(SCENES[scene]())
        data = json.loads(Parts(page("my-job", history)).texts["script application/json"])
        spans = sum(len(lane["spans"]) for lane in data["timeline"]["lanes"].values())
        assert spans == sum(len(node.spans) for node in history.nodes)
        assert data["rounds"] == len(history.rounds)
        assert data.get("closed") == short(cause(history.closed))
        assert data.get("partial", False) is not history.complete
        assert data["texts"].keys() == {event.id for event in history.events if detail_of(event) or event.nodes}

    @pytest.mark.parametrize("last", [START, START + 1e-3, START + 1e7, 1e16])
    def test_any_length_of_time(self, last: float) -> None:
        first = three_nodes()[0]
        assert page("my-job", replay([first, Lost(id="2-0", time=last, node=first.node)]))

    @pytest.mark.long
    def test_a_browser_shows_it_from_disk(self, tmp_path: Path) -> None:
        browser = Browser(tmp_path / "profile")
        try:
            (tmp_path / "it.html").write_text(page("my-job", replay(three_nodes())))
            browser.open(f"file://{tmp_path}/it.html")
            assert browser.until("h1", "my-job")
            assert browser.text(".lane-name").split() == ["gpu-a", "gpu-b", "gpu-c", "gpu-d"]
            legend = browser.text(".legend")
            assert re.search(r"training\s+69.2 %\s+steps made again\s+5.3 %", legend)
            assert re.search(r"lost\s+1\s+hung\s+1\s+drain\s+1", legend)
            assert "69.2 %" in browser.text(".figures")
            browser.run("document.querySelector('summary').click()")
            browser.until("details pre", "stack\nof it")
            dark = [{"name": "prefers-color-scheme", "value": "dark"}]
            grounds = []
            for medium in ("screen", "print"):
                browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": dark})
                grounds.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
            assert grounds == ["rgb(14, 17, 21)", "rgb(255, 255, 255)"], "dark on the screen, light on paper"
            story = Story()
            a, again, beside = story.node("a"), story.node("a"), story.node("a")
            story.join(0, [a])
            story.lose(10, a)
            story.join(20, [again])
            story.join(25, [beside])
            (tmp_path / "it.html").write_text(page(HOSTILE, replay(story.events(), START + 30)))
            browser.open(f"file://{tmp_path}/it.html")
            browser.until("h1", "<script>alert(1)</script>")
            assert browser.text(".lane-name").split("\n") == ["a", "a #2"], "a host that comes back keeps its lane"
            (tmp_path / "it.html").write_text(page("r", hostile()))
            browser.open(f"file://{tmp_path}/it.html")
            browser.until(".events", "<script>alert(1)</script>")
            assert browser.run("return document.querySelectorAll('main script, main img').length") == 0
            assert browser.console_errors() == []
        finally:
            browser.close()


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(server: RedisServer, run_id: str, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``redelastic timeline RUN``; returns the exit code and what it wrote."""

    def run(*arguments: str, run: str = run_id) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["timeline", run, "--endpoint", server.url, *arguments])
        return code, *capsys.readouterr()

    return run


class TestCommand:
    def test_a_run_that_goes_on(
        self, new_node: NodeFactory, command: Command, client: redis.Redis, keys: RunKeys, tmp_path: Path
    ) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        RunControl(node.backend.connection, keys).note(Progressed(node=node.node.id, step=1))
        code, out, err = command("--json")
        assert (code, err) == (0, "")
        data = json.loads(out)
        assert data["complete"]
        assert data["rounds"][0]["members"] == {node.node.id: 0}

        def trained() -> float:
            return float(json.loads(command("--json")[1])["seconds"]["training"])

        wait_until(lambda: trained() > 0.5, "the page ends now, not with the last event")
        for name in ("it.html", "IT.HTM"):
            code, out, err = command("--out", str(tmp_path / name))
            assert (code, out) == (0, "")
            assert re.fullmatch(r".*: 1 node, 1 round, 0 broken; [0-9,]+ bytes\n", err), err
            assert (tmp_path / name).stat().st_size > 5000
        assert node.node.id in (tmp_path / "it.html").read_text()
        moment = datetime.fromtimestamp(data["start"] + 0.4, timezone.utc).isoformat()
        part = json.loads(command("--json", "--since", moment)[1])
        assert not part["complete"]
        assert [span["state"] for span in part["nodes"][0]["spans"]] == ["training"]
        assert {event["event"] for event in part["events"]} <= {"outage"}  # of a busy machine

        node.node.stop()  # dead, and no other node can report it

        def lease_ends() -> float:
            stored: Any = client.zrange(keys.leases, 0, 0, withscores=True)
            return float(stored[0][1]) / 1000

        wait_until(lambda: lease_ends() < time.time(), "its lease ends")
        ends = {json.loads(command("--json")[1])["end"] for _ in range(3)}
        assert max(ends) - min(ends) < 0.1  # its last heartbeat
        assert max(ends) < time.time() - 0.5

    def test_the_page_is_named_after_the_run(
        self, new_node: NodeFactory, command: Command, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        new_node(1, 1).next_rendezvous()
        monkeypatch.chdir(tmp_path)
        assert command()[0] == 0
        assert [file.name for file in tmp_path.iterdir()] == [f"timeline-{run_id}.html"]

    def test_wrong_arguments(self, new_node: NodeFactory, command: Command, tmp_path: Path) -> None:
        new_node(1, 1).next_rendezvous()
        (tmp_path / "folder.html").mkdir()
        for arguments, said in [
            *(
                (
                    ("--out", name),
                    f"--out {name} must end in .html: the page is HTML, which a browser can print or save",
                )
                for name in ("it.png", "it.svg", "it.pdf", "it")
            ),
            (("--out", str(tmp_path / "no" / "it.html")), f"there is no directory {tmp_path / 'no'}."),
            (("--out", str(tmp_path / "folder.html")), "folder.html cannot be written: Is a directory."),
            (("--json", "--since", "yesterday"), "--since 'yesterday' is invalid: use 15m"),
            (("--json", "--since", "2999-01-01"), "--since 2999-01-01: the last event of run"),
        ]:
            code, out, err = command(*arguments)
            assert (code, out) == (2, ""), arguments
            assert said in err
            assert err.startswith("redelastic timeline: ")
            assert err.count("\n") == 1

    def test_no_such_run_and_no_events(self, command: Command, client: redis.Redis, keys: RunKeys) -> None:
        code, _, err = command("--json", run="not-there")
        assert (code, err.count("\n")) == (4, 1)
        client.hset(keys.run, "epoch", 1)
        client.expire(keys.run, 60)
        code, out, err = command("--json")
        assert (code, out) == (1, "")
        assert err == f"redelastic timeline: run {keys.run_id!r} has no events.\n"

    def test_it_needs_no_extra(self) -> None:
        script = "import sys, redelastic.dashboard.standalone; print(*({'starlette', 'uvicorn'} & {*sys.modules}))"
        loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        assert loaded.stdout.split() == []
