"""``redelastic demo`` as a user runs it: a real run with its kill, an interrupted one, and refused arguments."""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from redelastic.cli import main
from tests.support.commands import until

ENTRY_POINT = "import sys; from redelastic.cli import main; sys.exit(main())"
TRAINING = "redelastic.cli.demo.train"
RECORDING = Path(__file__).parents[2] / "docs" / "pictures" / "demo.svg"  # by docs/recording.py
MARK = "REDELASTIC_DEMO_TEST"  # an environment variable that every process of a demo inherits


class Demo:
    """Starts demos whose processes and files can be recognized."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), "COLUMNS": "80"}
        for forced in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            environment.pop(forced, None)
        return subprocess.Popen(
            [sys.executable, "-c", ENTRY_POINT, "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self.elsewhere,
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        """The demo's live processes."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def workers(self) -> list[psutil.Process]:
        """The live workers of the training."""
        return [process for process in self.processes() if _is_worker(_command(process))]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False

    def assert_nothing_is_left(self) -> None:
        until(lambda: not self.processes(), "all have ended, the reaper of a killed agent too")
        assert list(self.temporary.iterdir()) == []
        assert list(self.elsewhere.iterdir()) == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_worker(command: list[str]) -> bool:
    return TRAINING in command and "redelastic" not in command


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    made = Demo(tmp_path)
    yield made
    for process in made.processes():
        process.kill()


def recorded_lines() -> set[str]:
    """The lines of the README's picture of a demo, without those that continue one."""
    found = re.findall(r'<text [^>]*>(<tspan x="20" .*?)</text>', RECORDING.read_text())
    return {without_chance(html.unescape(re.sub(r"<[^>]+>", "", line))) for line in found}


def without_chance(line: str) -> str:
    """A line without what differs from run to run: numbers, node names and spaces."""
    line = re.sub(r"demo-\w+", "demo", line)
    return re.sub(r"[\d.:-]+|\b[A-Z]\b|\s", "", line)  # an image keeps other spaces


@pytest.mark.long
@pytest.mark.timeout(200)  # 50 s on two idle cores
def test_the_node_of_rank_0_dies_and_the_training_does_not(demo: Demo) -> None:
    process = demo.start()
    output, _ = process.communicate(timeout=190)
    assert process.returncode == 0, output

    accuracy = re.search(r"Of 360 held-out digits, ([\d.]+)% are read right", output)
    assert accuracy, output
    assert float(accuracy[1]) >= 95

    rows = [line.split(maxsplit=5)[2:] for line in output.splitlines() if re.match(r"[\d-]+ [\d:.]+ ", line)]
    events = [(event, epoch, node.partition("-")[0], reason.strip()) for event, epoch, node, reason in rows]
    completed = [(epoch, node) for event, epoch, node, _ in events if event == "completed"]
    assert [epoch for epoch, _ in completed] == ["1", "2", "3"], output
    victim = completed[0][1]
    survivors = {"A", "B", "C"} - {victim}
    assert {node for event, _, node, _ in events if event == "lost"} == {victim}
    for epoch, members in ("1", {"A", "B", "C"}), ("2", survivors), ("3", {*survivors, "D"}):
        started = {(node, reason[-4:]) for event, of, node, reason in events if (event, of) == ("started", epoch)}
        assert started == {(node, f"of {len(members)}") for node in members}
    assert {node for event, epoch, node, why in events if (event, why) == ("left", "finished")} == {*survivors, "D"}
    assert f"SIGKILL to node {victim}, agent and worker" in output
    assert re.search(r"s after the kill, . and . train on, from the checkpoint of step 1[01]0\.", output)
    assert re.search(r"the node of rank 0 died, the training did not. The others trained on [\d.]+ s later.", output)
    assert re.search(r"Of the nodes' time, \d+% was spent training \(ETTR\)\.", output)

    # The README's recording is of this program; who starts it, how far it comes and a worker's last words differ.
    always = {line for line in recorded_lines() if not line.startswith(("launched", "progressed", "failed"))}
    assert len(always) > 15
    said = {without_chance(line) for line in output.splitlines()}
    assert not {line for line in always if not any(whole.startswith(line) for whole in said)}

    assert "\x1b" not in output
    assert "\r" not in output
    assert "redis://" not in output  # the URL, with its password
    demo.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.timeout(200)  # 50 s on two idle cores
def test_the_others_survive_and_lose_no_step(demo: Demo) -> None:
    process = demo.start("--survive")
    assert process.stdout is not None
    lines: list[str] = []
    workers: set[int] = set()
    while line := process.stdout.readline():
        lines.append(line)
        if "SIGKILL to node" in line:
            workers = {worker.pid for worker in demo.workers()}
        if "All 3 train" in line:
            assert workers
            assert workers <= {worker.pid for worker in demo.workers()}, "those of the two others, and their templates"
    process.communicate(timeout=60)
    output = "".join(lines)
    assert process.returncode == 0, output
    killed = re.search(r"SIGKILL to node ., agent and worker, at step (\d+)", output)
    went_on = re.search(r"s after the kill, . and . train on, in the same processes, from step (\d+)\.", output)
    assert killed, output
    assert went_on, output
    assert int(went_on[1]) >= int(killed[1])
    demo.assert_nothing_is_left()


@pytest.mark.long
def test_the_training_waits_for_a_node_that_is_slow_to_start(tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.touch()
    command = [sys.executable, "-m", "redelastic", "run", "--standalone", "-m", TRAINING, "--steps=1", "--pace=0.01"]
    command += [f"--checkpoint={tmp_path / 'checkpoint.pt'}", f"--while={unfinished}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        while '"step": 3' not in training.stdout.readline():
            assert training.poll() is None
        unfinished.unlink()
        *_, last = training.stdout
        assert '"event": "done"' in last
        assert training.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.long
def test_an_interrupted_demo_leaves_nothing(demo: Demo, number: signal.Signals) -> None:
    process = demo.start("--nodes=2")
    assert process.stdout is not None
    while "completed" not in (line := process.stdout.readline()):
        assert line, "the demo ended early"
    while not demo.workers():
        time.sleep(0.02)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert f"Ended by {number.name}" in output
    demo.assert_nothing_is_left()


def test_a_demo_whose_node_dies_by_itself_fails_and_says_why(demo: Demo) -> None:
    process = demo.start("--nodes=2")
    assert process.stdout is not None
    while " start. " not in (line := process.stdout.readline()):
        assert line, "the demo ended early"
    agents: list[psutil.Process] = []
    while not agents:
        agents = [one for one in demo.processes() if "--nproc-per-node=1" in _command(one)]
    agents[0].kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert re.search(r"FAILED: node [AB]'s agent ended with exit code -9", output)
    demo.assert_nothing_is_left()


def test_help_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for expected in ("SIGKILL", "replacement", "accuracy", "--nodes"):
        assert expected in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nodes", "1"], "from 2 to 8, not '1'"),
        (["--nodes", "9"], "from 2 to 8, not '9'"),
        (["--nodes", "many"], "from 2 to 8, not 'many'"),
        (["--faster"], "--faster"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert complaint in text
    assert text.count("\n") == 1


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("rich", "sklearn"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert main(["demo"]) == 1
    text = capsys.readouterr().err
    assert "rich and sklearn" in text
    assert "pip install 'redelastic[demo]'" in text
    assert text.count("\n") == 1


def test_help_needs_neither_the_extra_nor_torch() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['rich', 'sklearn', 'numpy', 'torch', 'redis'])); "
    for arguments in ("--help", "demo --help"):
        done = subprocess.run(
            [sys.executable, "-c", blocked + ENTRY_POINT, *arguments.split()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "usage: " in done.stdout


def test_a_checkpoint_refuses_writers_of_older_rounds(tmp_path: Path) -> None:
    import torch

    from redelastic.cli.demo.train import load_checkpoint, make_network, save_checkpoint

    path = tmp_path / "checkpoint.pt"
    assert load_checkpoint(path) is None
    network = make_network()
    optimizer = torch.optim.Adam(network.parameters())

    def save(run: str, epoch: int, step: int, before: tuple[str, int] | None) -> None:
        states = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(path, (run, epoch), before, {"step": step, "samples": 0, **states})

    for epoch, step in ((1, 10), (2, 10), (2, 20)):
        save("a", epoch, step, None)
    with pytest.raises(RuntimeError, match="is of round 2 of run 'a': round 1 of run 'a' is over"):
        save("a", 1, 30, None)
    save("b", 1, 20, ("a", 2))  # another run goes on from it: its epochs begin at 1 again
    save("b", 1, 30, ("a", 2))
    for late in (2, 3):
        with pytest.raises(RuntimeError, match=f"is of round 1 of run 'b': round {late} of run 'a' is over"):
            save("a", late, 30, None if late == 2 else ("a", 2))
    with pytest.raises(RuntimeError, match="is of round 1 of run 'b'"):
        save("c", 1, 30, ("a", 2))
    state = load_checkpoint(path)
    assert state is not None
    assert (state["run"], state["epoch"], state["step"]) == ("b", 1, 30)


def test_each_pass_over_the_data_takes_a_sample_at_most_once() -> None:
    from redelastic.cli.demo.train import global_batch

    one_pass = [index for step in range(11) for index in global_batch(step, 128, 0, 1437).tolist()]
    assert len(one_pass) == len(set(one_pass)) == 11 * 128
    assert set(one_pass) <= set(range(1437))
    assert global_batch(11, 128, 0, 1437).tolist() != global_batch(0, 128, 0, 1437).tolist()
    assert global_batch(3, 128, 0, 1437).tolist() == global_batch(3, 128, 0, 1437).tolist()


@pytest.mark.long
def test_its_data_are_scikit_learns_digits() -> None:
    import numpy as np
    import torch
    from sklearn.datasets import load_digits

    from redelastic.cli.demo.train import TEST_SAMPLES, load_data

    (images, labels), (held_out, their_labels) = load_data()
    assert images.shape == (1797 - TEST_SAMPLES, 1, 8, 8)
    assert held_out.shape == (TEST_SAMPLES, 1, 8, 8)
    digits = load_digits()
    read = torch.cat([(torch.cat([images, held_out]) * 16).flatten(1), torch.cat([labels, their_labels])[:, None]], 1)
    theirs = np.column_stack([digits.data, digits.target])
    assert sorted(read.long().tolist()) == sorted(theirs.astype(int).tolist())
