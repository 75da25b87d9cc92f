"""A worker forked from a template looks like a new process; modules that cannot be preloaded are refused."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from redelastic.workers import template
from redelastic.workers.processes import set_subreaper
from redelastic.workers.site.sitecustomize import VARIABLE, receive, send
from redelastic.workers.template import Fork, Template, TemplateError
from tests.support.worker_processes import DEADLINE, expect_forks_at_once, until
from tests.support.workers import probe

PROBE = Path(probe.__file__)
MODULES = ("json", "logging", "random", "multiprocessing.pool", "threading")
OWN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
ENVIRONMENT = {**OWN_ENVIRONMENT, "PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": "0"}

Make = Callable[..., Template]


_children_before: set[int] = set()  # children of this process that no test here has started


@pytest.fixture(autouse=True)
def _adoption() -> Iterator[None]:
    _children_before.clear()
    _children_before.update(child.pid for child in psutil.Process().children())
    set_subreaper(True)
    yield
    set_subreaper(False)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Template] = []

    def start(
        *arguments: str, modules: tuple[str, ...] = MODULES, environment: Mapping[str, str] = ENVIRONMENT
    ) -> Template:
        made.append(Template([sys.executable, *arguments], modules, environment))
        return made[-1]

    yield start
    for one in made:
        one.close()


def run(one: Template | None, command: list[str], environment: Mapping[str, str], log: Path) -> tuple[int, str, str]:
    """Run a worker to its end, forked from a template or as a new process; its exit status, and what it printed."""
    out, err = log.with_suffix(".out"), log.with_suffix(".err")
    with out.open("w") as o, err.open("w") as e:
        if one is None:
            worker: Any = subprocess.Popen(command, env=environment, stdout=o, stderr=e, start_new_session=True)
        else:
            worker = one.fork(command, environment, o, e)
        status = worker.wait(DEADLINE)
    return status, out.read_text(), err.read_text()


def programs(folder: Path) -> dict[str, list[str]]:
    """Ways to start the probe; paths are relative to the folder or absolute."""
    package = folder / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("script.py", "pkg/__main__.py", "pkg/part.py"):
        (folder / name).write_text(PROBE.read_text())
    (folder / "link.py").symlink_to(package / "part.py")
    (folder / "folder").mkdir()
    (folder / "folder" / "__main__.py").write_text(PROBE.read_text())
    return {
        "script": ["-u", str(folder / "script.py")],
        "relative": ["-u", "pkg/part.py"],
        "link": ["-u", "link.py"],
        "buffered": ["script.py"],
        "optimised": ["-uOO", "script.py"],
        "module": ["-u", "-m", "pkg.part"],
        "package": ["-u", "-m", "pkg"],
        "folder": ["-u", "folder"],
    }


WAYS = ("script", "relative", "link", "buffered", "optimised", "module", "package", "folder")


@pytest.mark.parametrize("way", WAYS)
def test_a_fork_sees_what_a_new_process_sees(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**ENVIRONMENT, "RANK": "1", "ODD": "\udcff=\n", "PYTHONPATH": f"{tmp_path}/a:{tmp_path}/b"}
    saw = tmp_path / "saw"
    program = [*programs(tmp_path)[way], str(saw), "", "-x"]
    one = make(*program, "--rank=7", environment={**environment, "RANK": "7", "STALE": "1"})
    one.await_ready(DEADLINE)
    seen = []
    for how in (one, None):
        command = [sys.executable, *program, "--rank=1"]
        assert run(how, command, environment, tmp_path / "log") == (0, "", "")
        seen.append(json.loads(saw.read_text()))
        saw.unlink()
    forked, new = seen
    assert (forked["environment"]["RANK"], forked["argv"][-1]) == ("1", "--rank=1")
    assert forked["parent"] == os.getpid()
    assert forked == new


@pytest.mark.parametrize("ending", probe.ENDINGS)
def test_a_fork_ends_as_a_new_process_does(make: Make, tmp_path: Path, ending: str) -> None:
    command = [sys.executable, "-u", str(PROBE), str(tmp_path / "saw"), ending]
    one = make(*command[1:])
    one.await_ready(DEADLINE)
    ends = [run(how, command, ENVIRONMENT, tmp_path / "log") for how in (one, None)]
    forked, new = ((status, out, re.sub("(0x[0-9a-f]+|pid [0-9]+)", "", err)) for status, out, err in ends)
    assert forked == new
    assert one.lives()


@pytest.mark.parametrize("text", ["print(1", None], ids=["with an error", "that is not there"])
def test_a_script_that_cannot_run_gives_the_error_of_a_new_process(
    make: Make, tmp_path: Path, text: str | None
) -> None:
    script = tmp_path / "script.py"
    if text:
        script.write_text(text)
    command = [sys.executable, "-u", str(script)]
    one = make(*command[1:])
    one.await_ready(DEADLINE)
    forked, new = (run(how, command, ENVIRONMENT, tmp_path / "log") for how in (one, None))
    assert forked == new
    assert new[0] != 0


@pytest.mark.parametrize("text", ["import os; os.environ['CUSTOM'] = 'yes'", "import nowhere", "1 / 0"])
def test_a_sitecustomize_of_the_users_own_runs(make: Make, tmp_path: Path, text: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    (tmp_path / "script.py").write_text("import sys; print(sys.modules.get('sitecustomize'))")
    command = [sys.executable, "-u", str(tmp_path / "script.py")]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    one = make(*command[1:], environment=environment)
    one.await_ready(DEADLINE)
    (forked, _, forked_err), (new, _, new_err) = (
        run(how, command, environment, tmp_path / "log") for how in (one, None)
    )
    assert (forked, forked_err) == (new, new_err)


def test_random_state_differs_between_forks(make: Make, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing, numpy, os, random, tempfile\n"
        "print(random.random(), numpy.random.rand(), multiprocessing.current_process().authkey.hex(),"
        " tempfile.mktemp(), sep='\\n')"
    )
    command = [sys.executable, "-u", str(tmp_path / "script.py")]
    one = make(*command[1:], modules=("random", "numpy.random", "multiprocessing", "tempfile"))
    one.await_ready(DEADLINE)
    first, second = (run(one, command, ENVIRONMENT, tmp_path / "log")[1].splitlines() for _ in range(2))
    assert len(first) == 4
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_the_script_gets_the_preloaded_modules(make: Make, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import os\nprint('imported by', os.getpid(), flush=True)\nlayers = 3\n")
    (tmp_path / "script.py").write_text("import model; print(model.layers, model.__file__)")
    command = [sys.executable, "-u", str(tmp_path / "script.py")]
    one = make(*command[1:], modules=("model",))
    one.await_ready(DEADLINE)
    (tmp_path / "model.py").rename(tmp_path / "gone.py")
    assert run(one, command, ENVIRONMENT, tmp_path / "log") == (0, f"3 {tmp_path / 'model.py'}\n", "")


# -- what cannot be preloaded


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "from threading import Timer\nfor _ in 1, 2: t = Timer(60, print); t.daemon = True; t.start()",
            "bad starts 2 threads, which a fork would lose, when it is imported",
        ),
        (
            "import atexit, shutil, tempfile; folder = tempfile.mkdtemp(); atexit.register(shutil.rmtree, folder)",
            "bad makes a temporary folder, which workers would share, when it is imported",
        ),
        ("import subprocess; sleeper = subprocess.Popen(['sleep', '5'])", "bad starts a process"),
        ("raise RuntimeError('no')", "bad could not be imported: RuntimeError: no"),
        ("import nowhere", "bad could not be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("import sys; sys.exit(4)", "bad could not be imported: SystemExit: 4"),
        ("import os; os._exit(4)", "the template ended with status 4 during its imports"),
        ("import os; os.kill(os.getpid(), 9)", "the template was ended by SIGKILL during its imports"),
        ("import os; os.kill(os.getpid(), 40)", "the template was ended by SIGRTMIN+6 during its imports"),
        ("import torch; torch.cuda.init()", "bad initialises the GPU, which cannot be used after a fork"),
    ],
    ids=["threads", "folder", "process", "error", "missing", "exit", "_exit", "killed", "real-time", "gpu"],
)
def test_a_module_that_cannot_be_preloaded_is_refused_by_name(
    make: Make, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    (tmp_path / "good.py").write_text("import tempfile\nwith tempfile.TemporaryDirectory(): pass\n")
    # A stand-in for torch, whose GPU is initialised without one.
    (tmp_path / "torch.py").write_text(
        "class cuda:\n  ready = False\n  is_initialized = lambda: cuda.ready\n  def init(): cuda.ready = True\n"
    )
    one = make("-u", str(tmp_path / "script.py"), modules=("good", "bad", "json"))
    with pytest.raises(TemplateError, match=re.escape(reason)):
        one.await_ready(DEADLINE)
    until(lambda: not one.lives(), "its end")


def test_threads_that_a_fork_handler_ends_are_allowed(make: Make, tmp_path: Path) -> None:
    """The threads of numpy's OpenBLAS are such threads."""
    (tmp_path / "pool.py").write_text(
        "import os, threading\n"
        "done = threading.Event()\n"
        "thread = threading.Thread(target=done.wait)\n"
        "thread.start()\n"
        "os.register_at_fork(before=lambda: (done.set(), thread.join()))\n"
    )
    (tmp_path / "script.py").touch()
    command = [sys.executable, "-W", "error", str(tmp_path / "script.py")]
    one = make(*command[1:], modules=("pool",))
    one.await_ready(DEADLINE)
    assert run(one, command, ENVIRONMENT, tmp_path / "log") == (0, "", "")


def test_a_changed_file_is_found(make: Make, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("a = 1")
    one = make("-u", str(tmp_path / "script.py"), modules=("json", "model"))
    one.await_ready(DEADLINE)
    assert one.changed() == ""
    (tmp_path / "model.py").write_text("a = 10")
    assert one.changed() == str(tmp_path / "model.py")
    (tmp_path / "model.py").unlink()
    assert one.changed() == str(tmp_path / "model.py")


def test_the_look_for_changed_files_has_a_time_limit(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model.py", "late.py"):
        (tmp_path / name).touch()
    one = make("-u", str(tmp_path / "script.py"), modules=("json", "model", "late"))
    one.await_ready(DEADLINE)
    monkeypatch.setattr(template, "CHANGES_TIMEOUT", 0.0)
    (tmp_path / "late.py").write_text("a = 1")
    assert one.changed() == "", "there is no time for a second file"
    (tmp_path / "model.py").write_text("a = 1")
    assert one.changed() == str(tmp_path / "model.py"), "the user's own file comes first"


# -- a template or an agent that dies


def script_that_leaves_a_file(folder: Path) -> list[str]:
    (folder / "script.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return [sys.executable, "-u", str(folder / "script.py")]


def test_a_template_that_was_killed_starts_no_worker(make: Make, tmp_path: Path) -> None:
    command = script_that_leaves_a_file(tmp_path)
    one = make(*command[1:])
    one.await_ready(DEADLINE)
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(TemplateError, match=r"was ended by SIGKILL|does not answer"):
        one.fork(command, ENVIRONMENT, None, None)
    until(lambda: not one.lives(), "its end")
    assert adopted(one) is None
    assert not (tmp_path / "ran").exists()


def test_a_template_that_is_frozen_starts_no_worker_later(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = script_that_leaves_a_file(tmp_path)
    one = make(*command[1:])
    one.await_ready(DEADLINE)
    expect_forks_at_once(monkeypatch)
    os.kill(one.pid, signal.SIGSTOP)
    with pytest.raises(TemplateError, match="does not answer"):
        one.fork(command, ENVIRONMENT, None, None)
    os.kill(one.pid, signal.SIGCONT)
    worker = until(lambda: adopted(one), "the worker that it forks then")
    assert worker.wait(DEADLINE) == 0
    assert not (tmp_path / "ran").exists()


def adopted(one: Template) -> Fork | None:
    """The child of this process, other than the template, that leads a session."""
    new = {child.pid for child in psutil.Process().children()} - _children_before - {one.pid}
    return next((Fork(pid) for pid in new if os.getsid(pid) == pid), None)


@contextmanager
def hand_started(command: list[str], modules: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A template, and the socket that its agent would have."""
    agent_end, other_end = socket.socketpair()
    path = os.pathsep.join((template.SITE, str(Path(command[-1]).parent)))
    environment = {**ENVIRONMENT, "PYTHONPATH": path, VARIABLE: f"{other_end.fileno()}:{modules}"}
    with (
        agent_end,
        subprocess.Popen(command, env=environment, pass_fds=[other_end.fileno()], start_new_session=True) as process,
    ):
        other_end.close()
        agent_end.settimeout(DEADLINE)
        yield process, agent_end
        agent_end.close()  # ends it


def test_a_worker_starts_only_when_its_agent_says_so(tmp_path: Path) -> None:
    """An agent that is killed during the start leaves no worker."""
    command = script_that_leaves_a_file(tmp_path)
    with hand_started(command, "json") as (_, agent):
        assert receive(agent)[0][0] == "", "it can import all"
        agent_end, other_end = socket.socketpair()
        send(agent, (command, ENVIRONMENT, [], []), [other_end.fileno()])
        other_end.close()
        worker = Fork(int.from_bytes(agent_end.recv(8), "big"))
        agent.recv(1)
        assert worker.poll() is None
        agent_end.close()
        assert worker.wait(DEADLINE) == 0
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("when", ["idle", "importing"])
def test_a_template_ends_with_its_agent(tmp_path: Path, when: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()" if when == "importing" else "")
    with hand_started([sys.executable, str(tmp_path / "script.py")], "slow") as (process, agent):
        if when == "idle":
            receive(agent)
        agent.close()  # as the kernel does when the agent dies
        if when == "importing":
            (tmp_path / "fifo").write_text("")
        assert process.wait(DEADLINE) == 0


def test_a_template_that_waits_uses_no_cpu(make: Make, tmp_path: Path) -> None:
    one = make(str(tmp_path / "script.py"))
    one.await_ready(DEADLINE)
    process = psutil.Process(one.pid)
    assert os.getsid(one.pid) == one.pid, "Ctrl-C does not reach it"
    until(lambda: process.status() == psutil.STATUS_SLEEPING, "that it waits")
    switches = sum(process.num_ctx_switches())
    select.select([], [], [], 0.2)
    assert sum(process.num_ctx_switches()) == switches


@contextmanager
def standing_in(file: int, stream: int) -> Iterator[None]:
    """Meanwhile `file` is this process's standard input or output."""
    before = os.dup(stream)
    os.dup2(file, stream)
    try:
        yield
    finally:
        os.dup2(before, stream)
        os.close(before)


def test_output_to_a_file_is_buffered_though_the_template_is_on_a_terminal(make: Make, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.stdout.line_buffering)")
    command = [sys.executable, str(tmp_path / "script.py")]
    master, terminal = os.openpty()
    with standing_in(terminal, 1):
        one = make(*command[1:])
    one.await_ready(DEADLINE)
    assert run(one, command, ENVIRONMENT, tmp_path / "log") == (0, "False\n", "")
    assert one.fork(command, ENVIRONMENT, None, None).wait(DEADLINE) == 0
    assert os.read(master, 100) == b"True\r\n"
    os.close(master)
    os.close(terminal)


def test_a_template_keeps_nothing_of_its_workers(make: Make, tmp_path: Path) -> None:
    command = script_that_leaves_a_file(tmp_path)
    one = make(*command[1:])
    one.await_ready(DEADLINE)
    process = psutil.Process(one.pid)
    before = process.num_fds()
    for _ in range(3):
        assert run(one, command, ENVIRONMENT, tmp_path / "log")[0] == 0
    assert process.num_fds() == before
    assert process.children() == []


def test_a_fork_is_waited_for_as_a_process_is(make: Make, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; sys.stdin.read()")
    command = [sys.executable, str(tmp_path / "script.py")]
    read, write = os.pipe()
    with standing_in(read, 0):
        one = make(*command[1:])
    one.await_ready(DEADLINE)
    worker = one.fork(command, ENVIRONMENT, None, None)
    assert worker.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.01)
    os.close(write)
    assert worker.wait(DEADLINE) == 0
    other = one.fork(command, ENVIRONMENT, None, None)
    os.waitpid(other.pid, 0)
    assert other.wait() == template.LOST_STATUS
    os.close(read)
