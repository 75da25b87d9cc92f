"""The benchmarks work, and report lost ground; no test judges how fast anything is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import psutil
import pytest

from benchmarks import recovery
from benchmarks.__main__ import BEGIN, BENCHMARKS, END, README, pages, stolen, with_results
from benchmarks.recovery_job import OURS, Job
from benchmarks.report import RESULTS, Spread, Table, document, draw, markdown, regressions, summary, tables_of
from benchmarks.scale import Costs, limits
from tests.support.commands import until

ROOT = Path(__file__).parents[2]
LIMIT = 240.0  # for one benchmark with --quick, which takes some seconds, on a busy machine


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_answers_its_question(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", name, "--quick", f"--limit={LIMIT}", "--json", str(tmp_path)]
    environ = {**os.environ, "BENCHMARK": f"{name} {tmp_path}"}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1.5 * LIMIT
    )
    assert done.returncode == 0, done.stderr
    until(lambda: not _living_with(environ["BENCHMARK"]), "all its processes have ended")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["benchmark"] == name
    tables = tables_of(found)
    assert tables
    for table in tables:
        assert f"**{table.title}**" in done.stdout
        assert table.cells, table.name
        ours = [cells.get(table.base, next(iter(cells.values()))) for cells in table.cells.values()]
        assert all(isinstance(cell, Spread) or "failed" not in cell for cell in ours), table


def test_what_a_killed_benchmark_runs_ends_with_it(tmp_path: Path) -> None:
    """Its nodes lead process groups of their own, so that no signal to its group reaches them."""
    program = "from benchmarks.harness import run_alone; import time; run_alone(time.sleep, (600,), 600)"
    environ = {**os.environ, "BENCHMARK": str(tmp_path)}

    def leaders() -> list[int]:
        found = [process.pid for process in _living_with(str(tmp_path)) if process.pid != started.pid]
        return [pid for pid in found if os.getpgid(pid) == pid]

    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environ, start_new_session=True) as started:
        until(leaders, "it has begun")
        os.killpg(started.pid, signal.SIGKILL)
    until(lambda: not _living_with(str(tmp_path)), "all its processes have ended")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to keep apart")
def test_clients_started_while_servers_are_apart_have_all_cores() -> None:
    """Else they would share one with the server for as long as the benchmark runs."""
    ask = "from benchmarks.harness import run_alone; import os; print(run_alone(os.sched_getaffinity, (0,), 60))"
    program = f"from benchmarks.store_contenders import apart, serving\nwith serving() as s, apart(s): {ask}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(os.sched_getaffinity(0))


def test_of_a_frozen_node_nothing_is_left() -> None:
    job = Job(OURS, 2, {})
    job.start()
    frozen = psutil.Process(job.nodes[1].pid).children(recursive=True)
    job.hurt("freeze", 1)
    job.close()
    assert len(frozen) == 2, "its warden and its worker"
    until(lambda: not any(process.is_running() for process in frozen), "they have ended")


def test_a_job_that_is_terminated_has_ended_before_another_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    hurt = create_autospec(Job.hurt, side_effect=Job.hurt)
    monkeypatch.setattr(Job, "hurt", hurt)
    with recovery.Runner(LIMIT) as runner:
        found = runner.measure((recovery.Case("terminate", "another"), OURS))
        job = hurt.call_args.args[0]
        assert not any(node.is_alive() for node in job.nodes)
    assert found.result().stepped, found.result().missing


def _living_with(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("BENCHMARK") == token:
                found.append(process)
    return found


def _table(name: str = "t", **columns: float) -> Table:
    table = Table(name, "How long?", "nodes")
    for column, seconds in columns.items():
        table.put(2, column, seconds)
    return table


def test_lost_ground_is_told_from_a_slow_machine() -> None:
    before = _table(redelastic=1, theirs=10)
    assert not list(regressions([before], [_table(redelastic=3, theirs=30)])), "all is slower: so is the machine"
    assert not list(regressions([before], [_table(redelastic=1.4, theirs=10)])), "so much is noise"
    assert not list(regressions([before], [_table(redelastic=0.1, theirs=10)]))
    assert not list(regressions([before], [_table("new", redelastic=9, theirs=10)]))
    assert not list(regressions([before], [replace(_table(redelastic=9, theirs=10), yardstick="a socket")]))
    assert list(regressions([before], [_table(redelastic=2, theirs=10)])) == [
        "t, 2, theirs / redelastic: 10 x before, 5 x now"
    ]


def test_what_the_host_took_is_told_from_what_was_not_wanted() -> None:
    names = ("user", "nice", "system", "irq", "softirq", "steal", "idle", "iowait")
    before, after = (SimpleNamespace(**dict.fromkeys(names, 5.0)) for _ in range(2))
    assert stolen(before, after) == 0
    after.idle, after.iowait, after.user, after.softirq, after.steal = 90.0, 9.0, 10.0, 6.0, 7.0
    assert stolen(before, after) == 0.25
    assert stolen(psutil.cpu_times(), psutil.cpu_times()) >= 0  # this machine counts all of them


def test_of_rates_more_is_better() -> None:
    before, less, more = (_table(redelastic=rate, theirs=10) for rate in (10, 5, 20))
    before.unit = less.unit = more.unit = "/s"
    assert list(regressions([before], [less])) == ["t, 2, theirs / redelastic: 1 x before, 2 x now"]
    assert not list(regressions([before], [more]))


def test_a_table_survives_its_file_and_shows_ratios() -> None:
    table = _table(redelastic=0.001, theirs=0.0123, slow=1)
    table.put(2, "absent", "not within 60 s")
    table.targets["2"] = 0.003
    again = tables_of(json.loads(json.dumps(document("t", [table]))))
    assert again == [table]
    assert list(markdown(table))[2:] == [
        "| nodes | redelastic | theirs | slow | absent | target |",
        "|---:|---:|---:|---:|---:|---:|",
        "| 2 | 1 ms | 12.3 ms · 12 x | 1 s · 1,000 x | not within 60 s | 3 ms |",
    ]


@pytest.mark.parametrize("log", [True, False])
def test_a_table_of_zeros_is_drawn(tmp_path: Path, log: bool) -> None:
    """A short run may take no CPU time that the kernel counts."""
    table = Table("t", "CPU time", "nodes", log=log)
    for nodes in (16, 64):
        table.put(nodes, "redelastic", [0.0, 0.0])
    draw(table, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_too_cheap_to_measure_sets_no_limit() -> None:
    table = limits(Costs(form=1e-4, beat=1e-4, complete=1e-5, tell=1e-5, lose=0.0, keys=1e3, connection=1e3))
    bound = "a dead node is known everywhere within 100 ms of its lease (I7)"
    assert table.cells.pop(bound)["nodes"] == "too cheap to measure"
    assert all(isinstance(cells["nodes"], Spread) for cells in table.cells.values())


def test_targets_are_summed_up() -> None:
    table = _table(redelastic=0.002, theirs=0.05, slow=0.062)
    table.put(8, "redelastic", 0.004)
    table.put(8, "slow", 0.1)
    table.targets, table.leads = {"2": 0.003, "8": 0.002}, {"theirs": 30, "slow": 20}
    assert list(summary([("t", table)]))[2:] == [
        "| How long? | nodes: 2 | at most 3 ms | 2 ms | 67% |  | `t` |",
        "| How long? | nodes: 8 | at most 2 ms | 4 ms | 200% | **missed** | `t` |",
        "| How long? | nodes: 2, where theirs is nearest | theirs at least 30 x ours | 25 x | 83% | **missed** | `t` |",
        "| How long? | nodes: 8, where slow is nearest | slow at least 20 x ours | 25 x | 125% |  | `t` |",
    ]


def test_kept_results_replace_those_before(tmp_path: Path) -> None:
    table = _table(redelastic=1, theirs=2)
    table.targets["2"] = 0.5
    (tmp_path / "store.json").write_text(json.dumps(document("store", [table])))
    page = f"# Benchmarks\n\n{BEGIN}\nold\n{END}\n\nthe end\n"
    once = with_results(page, tmp_path)
    assert once.startswith("# Benchmarks\n")
    assert once.endswith("\n\nthe end\n")
    assert "old" not in once
    assert "0 of 1 [targets]" in once
    assert "**missed**" in once
    assert "[store](results/store.md)" in once
    assert with_results(once, tmp_path) == once
    assert "| 2 | 1 s | 2 s · 2 x | 500 ms |" in dict(pages(tmp_path))["store.md"]


def test_the_kept_pages_are_those_of_the_kept_figures() -> None:
    written = dict(pages(RESULTS))
    assert written.keys() == {path.name for path in RESULTS.glob("*.md")}
    assert [name for name, text in written.items() if (RESULTS / name).read_text() != text] == []
    assert with_results(README.read_text(), RESULTS) == README.read_text()
