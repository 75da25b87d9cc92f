"""A soak from its first episode to its summary."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from redelastic.redis.server import RedisServer

from .chaos import Chaos, zygote
from .checker import Verdict, check
from .history import Event, Tail
from .schedule import Episode, episodes, plan

PATIENCE = 8.0  # seconds by which a busy machine may miss a time limit; what must never happen has no such tolerance

Say = Callable[[str], None]
Play = Callable[..., list[Event]]


@contextlib.contextmanager
def stage(folder: Path, defect: str = "") -> Iterator[Play]:
    """A server and a process that makes nodes; yields a function that plays an episode. ``defect``: see node.py."""
    with zygote(folder / "nodes.log", defect) as make, RedisServer(data_dir=folder / "redis") as server:

        def play(episode: Episode, patience: float = PATIENCE, say: Say = lambda _: None) -> list[Event]:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                return Chaos(episode, server, make, Path(own), patience=patience, say=say).run()

        yield play


def soak(
    seed: int,
    minutes: float,
    nodes: int,
    *,
    server_faults: bool,
    only: int | None = None,
    keep_going: bool = False,
    folder: Path | None = None,
    say: Say,
) -> list[Verdict]:
    """Plays and judges episodes; reports each promise that was not kept, and how to repeat its episode."""
    verdicts: list[Verdict] = []
    faults = " --server-faults" if server_faults else ""
    chosen: Iterable[Episode] = episodes(seed, minutes, nodes, server_faults=server_faults)
    if only is not None:
        chosen = [plan(seed, only, nodes, server_faults=server_faults)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="redelastic-soak-") as temporary, stage(Path(temporary)) as play:
        for episode in chosen:

            def report(words: str, name: str = episode.name) -> None:
                say(f"{time.monotonic() - started:6.0f} s  {name}: {words}")

            history = play(episode, say=report)
            verdict = check(history)
            verdicts.append(verdict)
            for violation in verdict.violations:
                say(f"VIOLATED {violation}")
            if verdict.violations:
                number = episode.name.rpartition("-")[2]
                say(f"again: python -m tests.proofs.soak --seed {seed} --nodes {nodes}{faults} --episode {number}")
                target = (folder or Path(tempfile.gettempdir())) / f"{episode.name}-{int(time.time())}.jsonl"
                say(f"history: {_keep(history, target, Path(temporary) / 'nodes.log')}")
                if not keep_going:
                    break
    say(f"seed {seed}: {summary(verdicts)}")
    return verdicts


def _keep(history: Iterable[Event], target: Path, log: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(event) + "\n" for event in history))
    target.with_suffix(".log").write_bytes(log.read_bytes())
    return target


def judge(path: Path) -> Verdict:
    """Judges a recorded history."""
    return check(sorted(Tail(path).read(), key=lambda event: event["t"]))


def summary(verdicts: Sequence[Verdict]) -> str:
    """The verdicts in one line."""
    violated = [violation for verdict in verdicts for violation in verdict.violations]
    kept = "all promises kept" if not violated else f"{len(violated)} violations"
    rounds, adds, excused = (sum(getattr(v, name) for v in verdicts) for name in ("rounds", "adds", "excused"))
    words = [f"{kept} in {len(verdicts)} episodes, {rounds} rounds, {adds} adds"]
    for what in ("detected", "regrouped"):
        seconds = [s for verdict in verdicts for s in getattr(verdict, what)]
        words += [f"{what} after {statistics.median(seconds):.2f} s (at most {max(seconds):.2f} s)"] if seconds else []
    return "; ".join(words) + (f"; {excused} entries excused" if excused else "")
