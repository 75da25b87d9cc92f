"""The timeline: pictures of a run's history, and the command that draws them."""

from __future__ import annotations

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
from xml.etree import ElementTree as ET

import pytest
import redis
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from redelastic import cli
from redelastic.cli.timeline import picture
from redelastic.cli.timeline.page import page
from redelastic.cli.timeline.picture import FORMATS, LOOK, render
from redelastic.cli.timeline.summary import MARKS
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.run.history import replay
from redelastic.run.records import Event
from tests.support.nodes import NodeFactory
from tests.support.scenes import HOSTILE, SCENES, START, Story, crowded, three_nodes
from tests.support.servers import wait_until


class TestPicture:
    @pytest.mark.parametrize("scene", SCENES)
    def test_no_text_is_cut_off_or_covers_another(self, scene: str) -> None:
        with style.context(LOOK):
            figure, _ = picture._draw(replay(SCENES[scene]()), f"my-job ({scene})")
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            texts: list[Text] = [*figure.texts]
            for axes in figure.axes:
                texts += axes.texts
                for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
                    low, high = sorted(axis.get_view_interval())
                    labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
                    texts += [axis.label, *(label for at, label in labels if low <= at <= high)]
            texts = [text for text in texts if text.get_text()]
            boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in texts]
        assert len(boxes) > 8
        for text, box in boxes[: len(figure.texts)]:
            assert box.x1 < figure.axes[0].get_window_extent().x0, text  # the panel on the right
        for i, (text, box) in enumerate(boxes):
            assert box.x0 >= 0, text
            assert box.y0 >= 0, text
            assert box.x1 <= figure.bbox.x1, text
            assert box.y1 <= figure.bbox.y1, text
            for other, its in boxes[:i]:
                # Ascenders and descenders of lines that follow close may touch.
                assert not box.padded(-2).overlaps(its.padded(-2)), (text, other)

    @pytest.mark.parametrize(("form", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<svg")])
    def test_formats(self, form: str, magic: bytes) -> None:
        assert render(replay(three_nodes()), "my-job", form).startswith(magic)

    def test_each_bar_and_mark_says_what_it_is(self) -> None:
        history = replay(three_nodes())
        root = ET.fromstring(render(history, "my-job", "svg"))  # noqa: S314 - ours
        titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
        marks = [e for e in history.events if e.event in MARKS and e.reason != "regroups"]
        assert len(titles) == sum(len(node.spans) for node in history.nodes) + len(marks)
        hung = next(node.id for node in history.nodes if node.name == "gpu-d")
        assert f"{hung}: hung, worker 0 (rank 8) made no progress for 30 s, last at step 412" in titles
        assert any(re.fullmatch(rf"{hung}: training for .* s, round 3, rank 1", title) for title in titles)

    def test_reasons_are_written_beside_faults_where_there_is_room(self) -> None:
        with style.context(LOOK):
            figure, _ = picture._draw(replay(crowded()), "my-job")
        texts = {text.get_text() for axes in figure.axes for text in axes.texts}
        assert "gpu 3: ECC errors" in texts
        assert not any(text.startswith("lost its lease after") for text in texts)

    @pytest.mark.parametrize("last", [START, START + 1e-3, START + 1e7, 1e16])
    def test_any_length_of_time(self, last: float) -> None:
        first = three_nodes()[0]
        for form in FORMATS:
            assert render(replay([first, Event("2-0", last, "lost", 0, 0, first.node, "went")]), "my-job", form)

    def test_a_host_has_one_line_however_often_it_comes_back(self) -> None:
        story = Story()
        a, again, beside = story.node("a"), story.node("a"), story.node("a")
        story.join(0, [a])
        story.tell(10, "lost", a, "lost its lease after 6.0 s")
        story.join(20, [again])
        story.join(25, [beside])
        rows = picture._rows(replay(story.events(), START + 30))
        assert [(row.name, [node.id for node in row.nodes]) for row in rows] == [("a", [a, again]), ("a #2", [beside])]

    def test_nothing_from_redis_becomes_markup(self) -> None:
        story = Story()
        node = f"{HOSTILE}-1-0123456789ab"
        story.join(0, [node])
        story.complete(1, [node], "max_nodes joined")
        story.tell(2, "hung", node, HOSTILE, f"{HOSTILE}\n{HOSTILE}")
        story.tell(3, HOSTILE, node, HOSTILE)
        story.tell(4, "closed", "", HOSTILE)
        history = replay(story.events())
        for form in FORMATS:
            assert render(history, HOSTILE, form)
        svg = render(history, HOSTILE, "svg")
        html = page(history, HOSTILE, svg.decode())
        seen = Tags()
        seen.feed(html)
        plain = Tags()
        plain.feed(page(replay(three_nodes()), "x", render(replay(three_nodes()), "x", "svg").decode()))
        assert seen.tags <= plain.tags | {"details", "summary", "pre"}
        assert "script" not in seen.tags
        assert seen.attributes <= plain.attributes
        assert not [value for value in seen.links if not value.startswith("#")]  # it loads nothing
        assert "default-src 'none'" in html
        assert "&lt;script&gt;alert(1)" in html  # it is told, as text
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", html)


class Tags(HTMLParser):
    """What a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name.endswith(("href", "src"))]


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
        code, out, err = command("--json")
        assert (code, err) == (0, "")
        told = json.loads(out)
        assert told["complete"]
        assert told["rounds"][0]["members"] == {node.membership.node: 0}

        def trained() -> float:
            return float(json.loads(command("--json")[1])["seconds"]["training"])

        wait_until(lambda: trained() > 0.5, "the picture ends now, not with the last event")
        for name in ("it.png", "it.svg", "it.pdf", "it.html", "IT.PNG"):
            code, out, err = command("--out", str(tmp_path / name))
            assert (code, out) == (0, "")
            assert re.fullmatch(r".*: 1 node, 1 round, 0 broken; [0-9,]+ bytes\n", err), err
            assert (tmp_path / name).stat().st_size > 5000
        assert f">{node.membership.node}<" in (tmp_path / "it.html").read_text()
        moment = datetime.fromtimestamp(told["start"] + 0.4, timezone.utc).isoformat()
        part = json.loads(command("--json", "--since", moment)[1])
        assert not part["complete"]
        assert [span["state"] for span in part["nodes"][0]["spans"]] == ["training"]
        assert {event["event"] for event in part["events"]} <= {"outage"}  # of a busy machine

        node.membership.stop()  # dead, and nobody is there who could say so

        def lease_ends() -> float:
            stored: Any = client.zrange(keys.leases, 0, 0, withscores=True)
            return float(stored[0][1]) / 1000

        wait_until(lambda: lease_ends() < time.time(), "its lease ends")
        ends = {json.loads(command("--json")[1])["end"] for _ in range(3)}
        assert max(ends) - min(ends) < 0.1  # its last heartbeat
        assert max(ends) < time.time() - 0.5

    def test_wrong_arguments(self, new_node: NodeFactory, command: Command, tmp_path: Path) -> None:
        new_node(1, 1).next_rendezvous()
        (tmp_path / "folder.png").mkdir()
        for arguments, said in [
            ((), "give --out FILE.png, or --json."),
            (("--out", "it.gif"), "--out it.gif must end in one of .png, .svg, .pdf, .html."),
            (("--out", "it"), "--out it must end in one of .png, .svg, .pdf, .html."),
            (("--out", str(tmp_path / "no" / "it.png")), f"there is no directory {tmp_path / 'no'}."),
            (("--out", str(tmp_path / "folder.png")), "folder.png cannot be written: Is a directory."),
            (("--json", "--since", "yesterday"), "--since 'yesterday' is invalid: use 15m"),
            (("--json", "--since", "2999-01-01"), "--since 2999-01-01: the last event of run"),
        ]:
            code, out, err = command(*arguments)
            assert (code, out) == (2, ""), arguments
            assert said in err
            assert err.startswith("redelastic timeline: ")
            assert err.count("\n") == 1

    def test_without_matplotlib(self, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        code, out, err = command("--out", str(tmp_path / "it.png"))
        assert (code, out) == (2, "")
        assert err == "redelastic timeline: the picture needs matplotlib: pip install 'redelastic[timeline]'.\n"

    def test_no_such_run_and_no_events(self, command: Command, client: redis.Redis, keys: RunKeys) -> None:
        code, _, err = command("--json", run="not-there")
        assert (code, err.count("\n")) == (4, 1)
        client.hset(keys.run, "epoch", 1)
        client.expire(keys.run, 60)
        code, out, err = command("--json")
        assert (code, out) == (1, "")
        assert err == f"redelastic timeline: run {keys.run_id!r} has no events.\n"

    def test_it_is_light_to_load(self) -> None:
        script = (
            "import sys, redelastic.cli.timeline; print(*({'matplotlib', 'torch', 'rich', 'redis'} & {*sys.modules}))"
        )
        loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        assert loaded.stdout.split() == []


if __name__ == "__main__":  # python tests/cli/test_timeline.py DIRECTORY: the scenes, to be looked at
    for scene, write in SCENES.items():
        seen = replay(write())
        for form in FORMATS:
            file = Path(sys.argv[1]) / f"{scene.replace(' ', '-')}.{form}"
            file.write_bytes(render(seen, f"my-job ({scene})", form))
        svg = render(seen, f"my-job ({scene})", "svg").decode()
        (Path(sys.argv[1]) / f"{scene.replace(' ', '-')}.html").write_text(page(seen, scene, svg))
