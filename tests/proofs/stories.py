"""Golden transcripts: stories as text, replayed on the oracle and on the Lua.

The stories are in `transcripts/NAME.txt`, each below its title (`== title`). `python -m tests.proofs.stories` rewrites
the replies from the oracle, lists the files that differ and exits with 1 if there are any: read the diff before you
commit it. Of a new story write only the commands; it adds the rest.

A line is a time in ms, a node and its request, and the reply, in which `-` is nothing. Below it, `|` is an entry of the
wake stream, and `*` an event other than a join or a completed round. The test reads the commands from the text, and
compares the text with one made from the replies.

`x1 fails 20 ago in 3 at 7 of 2/1/3, finally` is a charge: a worker of the node x1, on the host x, failed 20 ms ago in
round 3, when it had done step 7; the job may make 2 restarts, 1 of them in a row without progress, and a host may be
the first to fail in 3 rounds in a row. `, silent` after the step: its workers have never reported one; `, saved`: they
have saved. `finally`: a loss of a member would be known by now. `, unsure`: nothing shows that the cause lies there.

`a joins of 1:2 for 3000 at 10000` is a join of a node that waits until the round is 10 s old, and until its workers
have saved, for which they have 3 s. `a lets in in 1`: they have saved.

`a calls 20 ago in 1` is a roll call: workers of the node a failed 20 ms ago in round 1. A node that `answers` beats and
has read of the roll call; one that `is back` beats and has just found Redis again. `, heard` and `, back` mean the same
for a join or a leave.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.proofs.oracle import apply
from tests.proofs.oracle_state import (
    NOTHING,
    Admit,
    Beat,
    Charge,
    Close,
    Drain,
    Join,
    Known,
    Leave,
    Readmit,
    Request,
    RollCall,
    Save,
    Settings,
    State,
)
from tests.proofs.twin import START, Server, stored

TRANSCRIPTS: Final = Path(__file__).parent / "transcripts"
COMMAND: Final = re.compile(
    r" *(?P<at>\d+)  (?P<node>\w+)"
    r" (?P<verb>joins|beats|leaves|finishes|gives up|closes|stops|drains|fails|is readmitted|calls|is back|answers"
    r"|asks for a save|lets in)"
    r"(?: after (?P<after>\d+))?(?: from (?P<label>\w+))?(?: of (?P<min>\d):(?P<max>\d))?"
    r"(?: (?P<ago>\d+) ago)?(?: in (?P<epoch>\d+))?(?: at (?P<step>\d+))?(?P<news>, silent|, saved)?"
    r"(?: of (?P<limits>[-\d]+/[-\d]+/[-\d]+))?(?: for (?P<save>-?\d+) at (?P<age>\d+))?"
    r"(?P<final>, finally)?(?P<aside>, heard|, back|, unsure)?"
)


def read_stories(name: str) -> dict[str, str]:
    """The stories of a transcript, by title."""
    _, *sections = (TRANSCRIPTS / f"{name}.txt").read_text().split("\n== ")
    titled = (section.partition("\n") for section in sections)
    return {title: story for title, _, story in titled}


def parse(line: str, roll_call: int | None = None) -> tuple[int, Request]:
    """The request of a line; ``roll_call`` is the one that is open."""
    found = COMMAND.match(line)
    assert found, line
    node, verb, settings = found["node"], found["verb"], Settings(int(found["min"] or 1), int(found["max"] or 1))
    knows = {"is back": Known(steady=0), "answers": Known(heard=roll_call or 0)}
    known = knows.get(ASIDES.get(found["aside"], verb), NOTHING)
    request: Request
    if verb == "joins":
        admission = int(found["save"] or 0), int(found["age"] or 0)
        request = Join(node, int(found["after"] or 0), f"{node}:1", found["label"] or "", settings, known, *admission)
    elif verb in ("beats", "is back", "answers"):
        request = Beat(node, settings, known)
    elif verb == "calls":
        request = RollCall(node, int(found["epoch"] or 1), int(found["ago"] or 0), 500)
    elif verb in ("closes", "stops"):
        request = Close(f"by {node}", settings.ttl, int(verb == "stops"))
    elif verb == "asks for a save":
        request = Save(f"by {node}", 30_000)
    elif verb == "lets in":
        request = Admit(node, int(found["epoch"] or 1), 0)
    elif verb == "drains":
        request = Drain(node, "preempted", 30_000)
    elif verb == "is readmitted":
        request = Readmit(node, "by hand")
    elif verb == "fails":
        budget, patience, limit = (-1 if part == "-" else int(part) for part in (found["limits"] or "-/-/-").split("/"))
        step = int(found["step"] or -1)
        when = int(found["epoch"] or 1), int(found["ago"] or 0), step, NEWS.get(found["news"], int(step >= 0))
        host = "" if found["aside"] == ", unsure" else node[0]
        request = Charge(node, host, *when, "died", budget, patience, limit, int(bool(found["final"])))
    else:
        request = LEAVES[verb](node)._replace(known=known)
    return START + int(found["at"]), request


NEWS: Final = {", silent": -1, ", saved": 2}
ASIDES: Final = {", heard": "answers", ", back": "is back"}
LEAVES: Final[dict[str, Callable[[str], Leave]]] = {
    "leaves": lambda node: Leave(node, ("reason", "left"), "goes on"),
    "finishes": lambda node: Leave(node, ("cause", "finished"), "closes"),
    "gives up": lambda node: Leave(node, ("cause", "failed"), "stops"),
}


def play(story: str, server: Server | None = None) -> str:
    """The story with its replies, from the server if one is given, else from the oracle."""
    state, shown = State(), {"wake": 0, "events": 0}
    lines: list[str] = []
    commands = [line.partition(" -> ")[0].rstrip() for line in story.splitlines() if line[8:9] not in "|*"]
    width = max(38, *map(len, commands))
    for command in commands:
        now, request = of_run(state, *parse(command, state.roll_called_at))
        state, reply = apply(state, now, request)
        if server:
            reply = server.apply(now, request)
        if reply[:1] == ("complete",):
            reply = (*reply[:5], reply[6])  # without the time, which is that of the line above, and the run's creator
        reply_text = ", ".join(str(part) if part != "" else "-" for part in reply)
        lines.append(f"{command:<{width}} -> {reply_text or 'nothing'}")
        whole = server.stored() if server else stored(state)
        lines += [f"{'':8}| {wake_text(entry)}" for entry in whole["wake"][shown["wake"] :]]
        recorded = [
            e for e in whole["events"][shown["events"] :] if e["event"] not in {"joined", "regrouped", "completed"}
        ]
        lines += [f"{'':8}* {event_text(entry)}" for entry in recorded]
        shown = {stream: len(whole[stream]) for stream in shown}
    return "\n".join(lines) + "\n"


def of_run(state: State, now: int, request: Request) -> tuple[int, Request]:
    """The request of a node that knows its run's incarnation and its workers' last requested save."""
    if isinstance(request, Join | Beat | Leave):
        request = request._replace(known=request.known._replace(incarnation=state.incarnation or ""))
    if isinstance(request, Admit):
        request = request._replace(save=state.save or 0)
    return now, request


def wake_text(entry: dict[str, str]) -> str:
    if entry["event"] in {"drain", "save"}:
        return " ".join("{event} {epoch}: {node} {reason} ({timeout} ms)".format_map(entry).split())
    if entry["event"] in {"roll_call", "answered"}:
        return "{event} {epoch}".format_map(entry)
    opening = "{event} {epoch} ({waiting} waiting)".format_map(entry)
    if "cause" not in entry:
        return opening
    event, node, *fields = json.loads(entry["cause"])
    return f"{opening}: {words(event, node, dict(zip(fields[::2], fields[1::2], strict=True)))}"


def event_text(entry: dict[str, str]) -> str:
    own = {name: value for name, value in entry.items() if name not in {"event", "epoch", "size", "node"}}
    return words(entry["event"], entry["node"], own)


def words(event: str, node: str, fields: dict[str, str]) -> str:
    return " ".join(part for part in (event, node, *(f"{name}={value}" for name, value in fields.items())) if part)


def main() -> int:
    """Rewrite the transcripts from the oracle; returns 1 if any differed."""
    status = 0
    for path in sorted(TRANSCRIPTS.glob("*.txt")):
        before = path.read_text()
        opening = before.partition("\n== ")[0]
        stories = read_stories(path.stem).items()
        after = "".join([opening, *(f"\n== {title}\n{play(story)}" for title, story in stories)])
        if after != before:
            path.write_text(after)
            sys.stdout.write(f"{path}: rewritten\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
