"""The checks before joining: found as real entry points; a user's command, and what it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from redelastic.host import checks, limited
from redelastic.host.checks import Node, disk, gpu, known_checks, memory, run_checks
from redelastic.host.limited import run_within
from tests.support import check_fixtures
from tests.support.liveness import lives
from tests.support.servers import wait_until

HOOKS = """
import sys, threading
def fit(node): return None
def empty(node): return ""
def unfit(node): return f"has {node.local_world_size} workers\\nand a broken fan"
def raises(node): raise OSError(5, "Input/output error")
def exits(node): sys.exit(3)
def unclear(node): return False
def hangs(node): threading.Event().wait()
"""


node = check_fixtures.node


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Another package, installed, with a module and entry points."""
    site, module = tmp_path / "site", f"hooks_of_{tmp_path.name}".replace("-", "_")
    info = site / "hooks-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(HOOKS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hooks\nVersion: 1.0\n")
    names = re.findall(r"def (\w+)", HOOKS)
    lines = [f"{name} = {module}:{name}" for name in names] + ["absent = no_such_module:check"]
    lines += [f"our-{name} = redelastic.host.checks:{name}" for name in ("gpu", "disk", "memory")]
    (info / "entry_points.txt").write_text("\n".join([f"[{checks.GROUP}]", *lines]))
    monkeypatch.syspath_prepend(site)
    yield module
    sys.modules.pop(module, None)


# -- running them


def test_checks_are_entry_points(hooks: str) -> None:
    assert {"fit", "unfit", "our-disk"} <= set(known_checks())
    assert known_checks()["our-disk"].load() is disk
    assert known_checks()["fit"].module == hooks


@pytest.mark.usefixtures("hooks")
def test_a_fit_node_is_fit(node: Node) -> None:
    assert run_checks([], None, node) is None
    assert run_checks(["fit", "empty", "our-gpu", "our-disk", "our-memory"], "true", node) is None


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unfit", "unfit: has 2 workers and a broken fan"),
        ("raises", "raises: OSError: [Errno 5] Input/output error"),
        ("exits", "exits: SystemExit: 3"),
        ("unclear", "unclear: returned False, which is neither a string nor None"),
        ("absent", "absent: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_the_reason_names_the_check(node: Node, name: str, reason: str) -> None:
    assert run_checks(["fit", name], "exit 1", node) == reason


@pytest.mark.usefixtures("hooks")
def test_the_first_reason_wins(node: Node) -> None:
    assert run_checks(["fit", "raises", "unfit"], "exit 1", node) == "raises: OSError: [Errno 5] Input/output error"
    assert run_checks(["unfit", "raises"], "exit 1", node) == "unfit: has 2 workers and a broken fan"


def test_an_unknown_check_is_an_error(node: Node, hooks: str) -> None:
    with pytest.raises(
        ValueError, match=r"Unknown health check 'fan'; known checks: .*fit, .*our-disk.*'redelastic\.health_ch"
    ):
        run_checks(["fit", "fan"], None, node)
    assert hooks not in sys.modules, "no check ran before the unknown name was refused"


@pytest.mark.usefixtures("hooks")
def test_a_check_that_hangs_refuses_the_node_at_its_timeout(tmp_path: Path) -> None:
    assert run_checks(["hangs"], None, Node(tmp_path, 1, timeout=0.2)) == "hangs: did not finish within 0.2 s"


def test_a_node_in_a_hurry_does_not_wait_for_its_checks(node: Node) -> None:
    """A node that is to leave does so at once, and is not refused."""
    hurried_at = time.monotonic() + 0.3
    assert run_checks((), "sleep 60", node, lambda: time.monotonic() > hurried_at) is None
    assert time.monotonic() - hurried_at < 30


def test_our_checks_fit_this_machine_when_asked_directly(node: Node) -> None:
    assert [check(node) for check in (gpu, disk, memory)] == [None, None, None]


# -- a command of the user


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true", None),
        ("echo all is well; exit 0", None),
        ("exit 3", "command: exited with 3"),
        ("echo first; echo the fan is broken >&2; echo; exit 3", "command: the fan is broken"),
        ("kill -SEGV $$", "command: was killed by SIGSEGV"),
        ("echo so far so good; kill -KILL $$", "command: was killed by SIGKILL"),
        ("printf 'caf\\351'; exit 1", "command: caf\N{REPLACEMENT CHARACTER}"),
        ("no-such-program", "command: /bin/sh: 1: no-such-program: not found"),
    ],
)
def test_a_command_refuses_by_its_exit_status(node: Node, command: str, reason: str | None) -> None:
    if command == "no-such-program" and Path("/bin/sh").resolve().name != "dash":
        pytest.skip("other shells word it differently")
    assert run_checks([], command, node) == reason


def test_a_long_line_and_much_output_are_cut(node: Node) -> None:
    reason = run_checks([], "head -c 50000000 /dev/zero | tr '\\0' x; exit 1", node)
    assert reason is not None
    assert re.fullmatch(r"command: x+…", reason)
    assert len(reason) <= checks.REASON_LENGTH + len("command: ")
    lines = run_within(node.timeout, ("/bin/sh", "-c", "yes | head -c 50000000")).lines
    assert 0 < sum(map(len, lines)) <= limited.OUTPUT_KEPT


def test_a_command_has_an_empty_input_not_the_agents(node: Node) -> None:
    own_input, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    try:
        assert run_checks([], 'test "$(readlink /proc/self/fd/0)" != /dev/null || { echo empty; exit 4; }', node) == (
            "command: empty"
        )
    finally:
        os.dup2(own_input, 0)
        for descriptor in (own_input, reading, writing):
            os.close(descriptor)


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    command = f"trap '' TERM; sleep 300 & echo $! >{tmp_path}/child; wait"
    reason = run_checks([], command, Node(tmp_path, 1, timeout=6))  # the shell's start may take seconds
    assert reason == "command: did not end within 6 s"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not lives(child), f"its child {child} is gone")


def test_a_background_process_of_a_command_is_killed_and_not_waited_for(tmp_path: Path, node: Node) -> None:
    reason = run_checks([], f"sleep 300 & echo $! >{tmp_path}/child; echo no; exit 1", node)
    assert reason == "command: no"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not lives(child), f"its child {child} is gone")


def test_a_daemon_of_the_command_that_holds_its_output_is_not_waited_for(tmp_path: Path, node: Node) -> None:
    if not shutil.which("setsid"):
        pytest.skip("no setsid here")
    started = f"setsid sh -c 'echo $$ >{tmp_path}/daemon; exec sleep 300' & until [ -s {tmp_path}/daemon ]; do :; done"
    assert run_checks([], f"{started}; echo no; exit 1", node) == "command: no"
    daemon = int((tmp_path / "daemon").read_text())
    assert lives(daemon), "its own session kept it alive, with the pipe open"
    os.kill(daemon, signal.SIGKILL)


def test_a_process_that_sigkill_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(limited, "_kill_group", kept.append)  # as with a process that hangs in the kernel
    monkeypatch.setattr(limited, "_running", set())
    reason = run_checks([], "exec sleep 300", Node(tmp_path, 1, timeout=0.2))
    (process,) = kept
    ran_still = process.poll() is None
    process.kill()
    process.wait(10)
    assert ran_still, "it ran when it was given up"
    hangs = f"not even SIGKILL ends process {process.pid}, which hangs in the kernel"
    assert reason == f"command: did not end within 0.2 s, and {hangs}"


SLOW_START: Final = (
    "import os, subprocess, sys, time\n"
    "class Slow(subprocess.Popen):\n"
    "    def __init__(self, *args, **more):\n"
    "        super().__init__(*args, **more)\n"
    "        while not os.path.exists(f'{sys.argv[1]}/ends'):\n"  # meanwhile the command runs, and its agent ends
    "            time.sleep(0.01)\n"
    "subprocess.Popen = Slow\n"
)


@pytest.mark.parametrize("start", ["", SLOW_START], ids=["as it runs", "as it starts"])
def test_an_agent_that_ends_during_a_check_leaves_no_process(start: str, tmp_path: Path) -> None:
    program = (
        f"{start}"
        "import signal, sys; from pathlib import Path; from redelastic.host.checks import Node, run_checks\n"
        "import atexit; atexit.register(lambda: Path(sys.argv[1], 'ends').touch())\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "run_checks([], f'echo $$ >{sys.argv[1]}/part; mv {sys.argv[1]}/part {sys.argv[1]}/pid; exec sleep 300',"
        " Node(Path(sys.argv[1]), 1, timeout=200))"
    )
    agent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    wait_until((tmp_path / "pid").exists, "the command runs")
    command = int((tmp_path / "pid").read_text())
    assert lives(command)
    agent.terminate()
    assert agent.wait(20) == 7
    wait_until(lambda: not lives(command), f"process {command} is gone")
