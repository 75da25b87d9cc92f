"""What happens in the demo, and whether it is what the demo promises."""

from __future__ import annotations

import queue
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from redelastic.run.wording import count

from .nodes import Changed, Event, Events, Exited, Interrupted, Nodes, Reported
from .view import Round, View

STEPS: Final = 500
SAVE_EVERY: Final = 10
PACE: Final = 0.05  # minimum seconds per step: a replacement that starts mid-training must join before the end
BATCH: Final = 128
ACCURACY: Final = 0.95  # as promised
TIME_LIMIT: Final = 240.0  # for everything, in seconds
TOO_LATE: Final = "the training was over before the replacement joined; this machine is very busy: try again"


class DemoError(Exception):
    """The demo did not go as promised."""


class InterruptedDemoError(Exception):
    """A signal asked the demo to end."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@dataclass(frozen=True)
class Plan:
    """What the user asked for; see the command's options."""

    nodes: int
    kill: bool
    seed: int

    @property
    def nnodes(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes."""
        return (self.nodes - 1 if self.kill else self.nodes), self.nodes

    @property
    def kill_at(self) -> int:
        """The step after which the node of rank 0 is killed: between two checkpoints, early in the run."""
        return STEPS // 5 + random.Random(self.seed).randrange(1, SAVE_EVERY)


class Story:
    """Takes in events and acts on them: kills, replaces, and keeps records.

    Args:
        plan: what the user asked for.
        nodes: the run's nodes.
        view: shows what happens.
        events: from the nodes.
    """

    def __init__(self, plan: Plan, nodes: Nodes, view: View, events: Events) -> None:
        self._plan, self._nodes, self._view, self._events = plan, nodes, view, events
        self._states: dict[str, str] = {}
        self._rounds: list[Round] = []
        self._broken_at: float | None = None  # None while the last round stands
        self._victim: str | None = None
        self._killed_at = 0.0
        self._replacement: str | None = None
        self._last_step = 0  # done by any round
        self._redone = 0
        self._result: dict[str, Any] | None = None
        self._launched = time.monotonic()

    def introduce(self, endpoint: str) -> None:
        """Say what is going to happen; ``endpoint`` is Redis' address, without the password."""
        kill = "Rank 0's node is killed while it trains; later a replacement joins."
        self._view.introduce(
            "redelastic demo",
            [
                f"{self._plan.nodes} nodes, each a `redelastic run`, learn handwritten digits (DDP, CPU).",
                f"They meet in Redis: run {self._nodes.run_id} on a private server, {endpoint}.",
                kill if self._plan.kill else "Nobody is killed.",
                "When a worker fails, every node must answer a roll call within 0.5 s.",
            ],
        )

    def run(self) -> None:
        """Play it to the end.

        Raises:
            DemoError: it does not go as promised.
            InterruptedDemoError: a signal asked the demo to end.
        """
        for _ in range(self._plan.nodes):
            self._set(self._nodes.start(), "starting")
        deadline = self._launched + TIME_LIMIT
        while any(state not in ("killed", "done") for state in self._states.values()):
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DemoError(f"the run was not over within {TIME_LIMIT:g} s") from None
            self._take_in(event)

    def _set(self, name: str, state: str) -> None:
        self._states[name] = state
        self._view.show_nodes(self._states)

    def _take_in(self, event: Event) -> None:
        if isinstance(event, Interrupted):
            raise InterruptedDemoError(event.signal)
        if isinstance(event, Exited):
            self._on_exit(event)
        elif isinstance(event, Changed):
            if event.event == "broken" and (self._broken_at is None or self._awaits_survivors()):
                self._on_break(event, time.monotonic())
            elif event.event == "roll_call" and self._awaits_survivors():
                seconds = time.monotonic() - self._killed_at
                self._view.note(f"a worker failed: roll call of all nodes, {seconds:.2f} s after the kill")
            elif event.event == "complete":
                self._on_round(event, time.monotonic())
        elif self._rounds and event.fields.get("epoch") == self._rounds[-1].epoch:
            self._on_report(event)

    def _on_exit(self, event: Exited) -> None:
        if event.node == self._victim:
            return
        if self._result is not None and event.node not in self._rounds[-1].members:
            raise DemoError(TOO_LATE)
        if self._result is None or event.code != 0:
            self._view.quote(self._nodes.log_tail(event.node))
            when = "during the run" if self._result is None else "after the training"
            raise DemoError(f"node {event.node}'s agent ended {when} with exit code {event.code}; its log is above")
        self._set(event.node, "done")

    # -- rounds

    def _awaits_survivors(self) -> bool:
        return self._victim is not None and self._victim in self._rounds[-1].members

    def _on_break(self, event: Changed, now: float) -> None:
        self._broken_at = self._broken_at or now
        text = f"round {event.epoch} is broken: {event.reason}"
        if self._awaits_survivors():
            text += f", {now - self._killed_at:.2f} s after the kill"
        self._view.note(text, "yellow")
        self._view.show_activity("regrouping")

    def _on_round(self, event: Changed, now: float) -> None:
        before = self._rounds[-1].members if self._rounds else ()
        joined = [name for name in event.members if name not in before]
        gone = [name for name in before if name not in event.members]
        since = self._broken_at or now
        if not before:
            cause, since = f"{len(joined)} nodes started", self._launched
        elif gone == [self._victim] and not joined:
            cause, since = f"{self._victim} was killed", self._killed_at
        else:
            cause = ", ".join([f"{name} joined" for name in joined] + [f"{name} was lost" for name in gone])
        self._broken_at = None
        cause = cause or "a worker failed"
        self._rounds.append(Round(event.epoch, event.members, cause, since, now))
        for rank, name in enumerate(event.members):
            self._set(name, f"rank {rank}")
        ranks = " ".join(event.members)
        self._view.note(f"round {event.epoch} formed, {now - since:.2f} s after {cause}; by rank: {ranks}", "bold cyan")
        self._view.show_activity("starting workers")

    # -- the training

    def _on_report(self, event: Reported) -> None:
        fields, current = event.fields, self._rounds[-1]
        if fields["event"] == "start":
            current.resumed_at = current.last_step = fields["step"]
            if len(self._rounds) > 1:
                redone = self._last_step - fields["step"]
                self._redone += redone
                self._view.note(
                    f"resumed from the checkpoint of step {fields['step']}: {count(redone, 'step')} to redo"
                )
        elif fields["event"] == "step":
            self._on_step(current, fields["step"], fields["loss"])
        elif fields["event"] == "done":
            self._result = fields
            self._view.note(f"all {fields['step']} steps done, accuracy {fields['accuracy']:.1%}", "bold")
            self._view.show_activity("ending")

    def _on_step(self, current: Round, step: int, loss: float) -> None:
        current.last_step = self._last_step = step
        self._view.show_step(step, loss)
        if current.first_step is None:
            current.first_step = time.monotonic()
            self._view.note(f"step {step} done, {current.first_step - current.since:.1f} s after {current.cause}")
            if self._victim is not None and self._replacement is None and not self._awaits_survivors():
                self._replacement = self._nodes.start()
                self._set(self._replacement, "starting")
                self._view.note(f"replacement started, node {self._replacement}", "green")
        if self._plan.kill and self._victim is None and step >= self._plan.kill_at:
            self._kill(current.members[0], step)

    def _kill(self, name: str, step: int) -> None:
        self._victim, self._killed_at = name, time.monotonic()
        killed = self._nodes.kill(name)
        if killed < 2:
            raise DemoError(f"expected an agent and a worker of node {name} to kill, found {killed}")
        self._set(name, "killed")
        self._view.note(f"SIGKILL to node {name}, rank 0, at step {step}: its agent and worker are dead", "bold red")
        self._view.show_activity("rank 0 is dead")

    # -- the end

    def conclude(self) -> None:
        """Show the outcome.

        Raises:
            DemoError: it is not what was promised.
        """
        result = self._result
        if result is None:
            raise DemoError("the nodes ended, but rank 0 has not reported a result")
        self._view.tabulate(self._rounds)
        self._view.list_facts(
            {
                "accuracy": f"{result['accuracy']:.1%} of {result['test_samples']} held-out digits "
                f"(expected: at least {ACCURACY:.0%})",
                "steps": f"{result['step']} of {BATCH} samples, each counted once; {self._redone} were redone",
                "time": f"{time.monotonic() - self._launched:.0f} s",
            }
        )
        for problem in self._problems(result):
            raise DemoError(problem)
        ending = "the node of rank 0 died, the training did not." if self._plan.kill else "nobody was killed."
        self._view.conclude(f"As expected: {ending}", "bold green")

    def _problems(self, result: dict[str, Any]) -> Iterator[str]:
        if result["accuracy"] < ACCURACY:
            yield f"the accuracy is {result['accuracy']:.1%}, less than {ACCURACY:.0%}"
        if (result["step"], result["samples"]) != (STEPS, STEPS * BATCH):
            yield f"{result['samples']} samples in {result['step']} steps were counted, not {STEPS * BATCH} in {STEPS}"
        if not self._plan.kill:
            return
        trained = [one.members for one in self._rounds if one.last_step > one.resumed_at]
        if self._victim is None:
            yield "the training was over before a node could be killed"
        elif all(self._victim in members for members in trained):
            yield "the survivors did not train without the node that was killed"
        elif all(self._replacement not in members for members in trained):
            yield TOO_LATE
