"""Which template workers are forked from, and when they start as new processes: a WarmStart without an agent."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import api

from redelastic.workers import warm
from redelastic.workers.processes import set_subreaper
from redelastic.workers.template import Fork
from redelastic.workers.warm import WarmStart, require_preloadable
from tests.support.liveness import lives
from tests.support.torchrun_job import LIMIT
from tests.support.worker_processes import expect_forks_at_once, until

pytestmark = pytest.mark.timeout(300)

MODEL = "import os\nthreads = os.environ.get('OMP_NUM_THREADS')\nvalue = 1\n"


@pytest.fixture
def spared() -> set[int]:
    """The pids of the templates that live."""
    return set()


@pytest.fixture
def make(tmp_path: Path, spared: set[int]) -> Iterator[Callable[..., WarmStart]]:
    made: list[WarmStart] = []
    set_subreaper(True)

    def start(*modules: str, is_hurried: Callable[[], bool] = lambda: False) -> WarmStart:
        arguments = ("-u", str(tmp_path / "script.py"), "--rank=${local_rank}")
        spec: Any = SimpleNamespace(entrypoint=sys.executable, args=arguments, local_world_size=2)
        tree: Any = SimpleNamespace(spare=spared.add, release=spared.discard)
        made.append(WarmStart(spec, modules, {"OWN": "1"}, tree, is_hurried))
        return made[-1]

    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text("import model, sys; print(model.threads, model.value, *sys.argv[1:])")
    yield start
    for one in made:
        one.close()
    set_subreaper(False)


def start_group(one: WarmStart, tmp_path: Path, **environment: str) -> list[tuple[bool, str]]:
    """Have torch start two workers, and wait for their ends: whether each is a fork, and what it printed."""
    ends = []
    with one.starting():
        handlers = [
            api.get_subprocess_handler(
                entrypoint=sys.executable,
                args=("-u", str(tmp_path / "script.py"), f"--rank={rank}"),
                env={"RANK": str(rank), "REDELASTIC_EPOCH": "7", "OWN": "1", **environment},
                stdout=str(tmp_path / f"{rank}.out"),
                stderr="",
                local_rank_id=rank,
                numa_options=None,
            )
            for rank in range(2)
        ]
    for rank, handler in enumerate(handlers):
        assert handler.proc.wait(LIMIT) == 0
        assert handler._stdout
        handler._stdout.close()
        ends.append((isinstance(handler.proc, Fork), (tmp_path / f"{rank}.out").read_text().strip()))
    return ends


def only(pids: set[int]) -> int:
    [pid] = pids
    return pid


def test_a_template_serves_as_long_as_it_fits(make: Callable[..., WarmStart], spared: set[int], tmp_path: Path) -> None:
    one = make("model")
    one.prepare()
    first = only(spared)
    assert start_group(one, tmp_path, OMP_NUM_THREADS="3", LOCAL_RANK="0")[0] == (True, "3 1 --rank=0")
    second = only(spared)
    assert second != first, "the variables that imports may have read have changed"
    more = {
        "LOCAL_RANK": "5",
        "MASTER_PORT": "9",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "REDELASTIC_EPOCH": "8",
        "CUDA_VISIBLE_DEVICES": "4",
        "GLOO_SOCKET_IFNAME": "x",
    }
    assert start_group(one, tmp_path, OMP_NUM_THREADS="3", **more)[1] == (True, "3 1 --rank=1")
    assert spared == {second}
    (tmp_path / "model.py").write_text(MODEL + "value = 22\n")
    assert start_group(one, tmp_path, OMP_NUM_THREADS="3")[0] == (True, "3 22 --rank=0")
    assert only(spared) not in (first, second)
    template_process = psutil.Process(only(spared))
    one.close()
    assert not lives(template_process)
    assert spared == set()


def test_workers_see_the_variables_that_imports_have_set(make: Callable[..., WarmStart], tmp_path: Path) -> None:
    """Variables that the agent sets for each worker take precedence."""
    (tmp_path / "env.py").write_text(
        "import os; os.environ.update(SET='by import', RANK='9', CHANGED='by import'); del os.environ['GONE']"
    )
    (tmp_path / "script.py").write_text(
        "import os; print([os.environ.get(name) for name in ('SET', 'RANK', 'CHANGED', 'GONE')])"
    )
    one = make("env")
    given = {"CHANGED": "given", "GONE": "given"}
    expected = [(True, f"['by import', '{rank}', 'by import', None]") for rank in range(2)]
    assert start_group(one, tmp_path, **given) == expected


def test_workers_do_not_wait_for_ever_for_a_template(
    make: Callable[..., WarmStart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm, "TEMPLATE_TIMEOUT", 0.01)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    one = make("slow")
    one.prepare()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [False, False]
    assert [r.getMessage() for r in caplog.records] == [
        (
            "Nothing is preloaded, and workers start as new processes: "
            "the template did not finish its imports within 0.01 s."
        )
    ]
    (tmp_path / "fifo").write_text("")
    monkeypatch.undo()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [True, True], (
        "the template is ready for the next workers"
    )


def test_a_node_that_is_to_leave_does_not_wait_for_its_template(make: Callable[..., WarmStart], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    one = make("slow", is_hurried=lambda: True)
    one.prepare()
    began = time.monotonic()
    one.await_template()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [False, False]
    assert time.monotonic() - began < warm.TEMPLATE_TIMEOUT


def test_the_death_of_a_template_is_noticed_though_its_child_lives_on(
    make: Callable[..., WarmStart], spared: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The child has the agent's socket too, so the socket does not close."""
    writes = f"open({str(tmp_path / 'child')!r}, 'w').write(str(child))"
    (tmp_path / "dies.py").write_text(f"import os, time\nchild = os.fork() or time.sleep(600)\n{writes}\nos._exit(3)")
    one = make("dies")
    one.prepare()
    dead = psutil.Process(only(spared))
    until(lambda: not lives(dead), "its end")
    try:
        one.tend()
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert spared == set()
    assert "the template ended with status 3 during its imports" in caplog.text


def test_a_module_that_cannot_be_preloaded_is_logged_once(
    make: Callable[..., WarmStart], spared: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.py").write_text("import threading; t = threading.Timer(60, print); t.daemon = True; t.start()")
    one = make("model", "bad")
    one.prepare()

    def refused() -> bool:
        one.tend()
        return not spared

    until(refused, "that it is refused")
    for _ in range(2):
        assert [fork for fork, _ in start_group(one, tmp_path)] == [False, False]
    [record] = caplog.records
    assert record.getMessage() == (
        "Nothing is preloaded, and workers start as new processes: "
        "bad starts 1 thread, which a fork would lose, when it is imported."
    )


def test_a_template_that_was_killed_is_replaced_once_until_workers_need_it(
    make: Callable[..., WarmStart], spared: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = make("model")
    assert start_group(one, tmp_path)[0][0]
    for replaced in (True, False):
        one.await_template()
        before = psutil.Process(only(spared))
        before.kill()
        until(lambda: not lives(before), "its end")  # noqa: B023  # called at once
        one.tend()
        assert (len(spared), before.pid in spared) == (replaced, False), "another process may get its number"
    assert [fork for fork, _ in start_group(one, tmp_path)] == [True, True]
    line = "The worker template was ended by SIGKILL; {}."
    what_next = ("creating a new one", "the next workers get a new one")
    assert [record.getMessage() for record in caplog.records] == [line.format(then) for then in what_next]


def test_a_ready_template_is_watched_without_polling(make: Callable[..., WarmStart], spared: set[int]) -> None:
    """Polling each second took a tenth of an agent's CPU time."""
    one = make("model")
    one.prepare()
    one.await_template()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.tend)
        with pytest.raises(TimeoutError):  # while it lives, only the limit ends the wait
            waiting.result(0.3)
        os.kill(only(spared), signal.SIGKILL)
        waiting.result(warm.END_TIMEOUT / 2)


def test_a_template_that_hangs_is_given_up_for_this_group(
    *,
    make: Callable[..., WarmStart],
    spared: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = make("model")
    assert start_group(one, tmp_path)[0][0]
    expect_forks_at_once(monkeypatch)
    frozen = psutil.Process(only(spared))
    frozen.suspend()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [False, False]
    assert not lives(frozen)
    assert len(caplog.records) == 1
    assert "workers start as new processes: the template failed: it does not answer" in caplog.text
    monkeypatch.undo()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [True, True]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"entrypoint": print}, "workers are functions"),
        ({"entrypoint": print, "args": (3, None)}, "workers are functions"),
        ({"entrypoint": "ls"}, "workers are started by ls, not by this Python"),
        ({"args": ("-u", "-I", "x.py")}, "-I is a Python option"),
        ({"numa_options": object()}, "NUMA nodes"),
        ({"owns_process": False}, "this process is not the agent's own"),
    ],
)
def test_a_spec_that_cannot_be_preloaded_is_refused(wrong: dict[str, Any], reason: str) -> None:
    settings = {"entrypoint": sys.executable, "args": ("-u", "-m", "x", "-I"), "numa_options": None, **wrong}
    owns_process = settings.pop("owns_process", True)
    spec: Any = SimpleNamespace(**settings)
    with pytest.raises(ValueError, match=f"Nothing can be preloaded here: .*{reason}.* Remove preload"):
        require_preloadable(spec, owns_process=owns_process)


def test_a_spec_that_can_be_preloaded_is_accepted() -> None:
    for args in (("-u", "x.py", "-c"), ("-uOO", "-m", "x", "-I"), ("x.py",)):
        spec: Any = SimpleNamespace(entrypoint=sys.executable, args=args, numa_options=None)
        require_preloadable(spec, owns_process=True)
