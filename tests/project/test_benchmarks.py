"""The benchmarks work and report regressions; no test judges a speed."""

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

import psutil
import pytest

from benchmarks import recovery
from benchmarks.__main__ import BEGIN, BENCHMARKS, END, README, keep, stolen, targets, with_results
from benchmarks.peers import summed_up
from benchmarks.recovery_job import OURS, Job
from benchmarks.report import RESULTS, Spread, Table, document, markdown, regressions, summary, tables_of
from benchmarks.scale import beyond_heartbeats, limits
from tests.support.commands import until

ROOT = Path(__file__).parents[2]
LIMIT = 240.0  # for one benchmark with --quick, which takes some seconds, on a busy machine
PEERS_LIMIT = 900.0  # for the one that installs its peers first


@pytest.mark.long
@pytest.mark.timeout(2 * PEERS_LIMIT)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "rendezvous" else pytest.mark.long) for name in BENCHMARKS]
)
def test_each_answers_its_question(name: str, tmp_path: Path) -> None:
    limit = PEERS_LIMIT if name == "peers" else LIMIT
    folder = tmp_path / "new"
    command = [sys.executable, "-m", "benchmarks", name, "--quick", f"--limit={limit}", "--json", str(folder)]
    environ = {**os.environ, "BENCHMARK": f"{name} {folder}"}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1.5 * limit
    )
    assert done.returncode == 0, done.stderr
    until(lambda: not _living_with(environ["BENCHMARK"]), "all its processes have ended")
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["benchmark"] == name
    tables = tables_of(found)
    assert tables
    for table in tables:
        assert f"**{table.title}**" in done.stdout
        assert table.cells, table.name
        ours = [cells.get(table.base, next(iter(cells.values()))) for cells in table.cells.values()]
        assert all(isinstance(cell, Spread) or "failed" not in cell for cell in ours), table


@pytest.mark.long
def test_processes_of_a_killed_benchmark_end_with_it(tmp_path: Path) -> None:
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


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to keep apart")
def test_clients_started_while_servers_are_apart_have_all_cores() -> None:
    """Otherwise they would share one core with the server for the whole benchmark."""
    ask = "from benchmarks.harness import run_alone; import os; print(run_alone(os.sched_getaffinity, (0,), 60))"
    program = f"from benchmarks.store_contenders import apart, serving\nwith serving() as s, apart(s): {ask}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(os.sched_getaffinity(0))


@pytest.mark.long
def test_nothing_is_left_of_a_frozen_node() -> None:
    job = Job(OURS, 2, {})
    job.start()
    frozen = psutil.Process(job.nodes[1].pid).children(recursive=True)
    job.hurt("freeze", 1)
    job.close()
    assert len(frozen) == 2, "its reaper and its worker"
    until(lambda: not any(process.is_running() for process in frozen), "they have ended")


@pytest.mark.long
def test_a_job_that_is_terminated_has_ended_before_another_starts() -> None:
    with recovery.Runner() as runner:
        found = runner.measure((recovery.Case("terminate", "another"), OURS))
        assert found.done(), "the result comes after the job is closed, which waits for all nodes"
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


def _lost(before: Table, now: Table) -> list[str]:
    return list(regressions("\n".join(markdown(before)), [now]))


def test_regressions_are_distinguished_from_a_slow_machine() -> None:
    before = _table(redelastic=1, theirs=10)
    assert not _lost(before, _table(redelastic=3, theirs=30)), "everything is slower: the machine is"
    assert not _lost(before, _table(redelastic=1.4, theirs=10)), "that much is noise"
    assert not _lost(before, _table(redelastic=0.1, theirs=10))
    assert not _lost(before, replace(_table(redelastic=9, theirs=10), title="Another question?"))
    assert not _lost(before, replace(_table(redelastic=9, theirs=10), yardstick="a socket"))
    assert _lost(before, _table(redelastic=2, theirs=10)) == ["How long?, 2, theirs / redelastic: 10 x before, 5 x now"]
    far = _table(redelastic=0.001, theirs=2)
    assert _lost(far, _table(redelastic=0.002, theirs=2)) == [
        "How long?, 2, theirs / redelastic: 2e+03 x before, 1e+03 x now"
    ]


def test_stolen_time_is_distinguished_from_idle_time() -> None:
    names = ("user", "nice", "system", "irq", "softirq", "steal", "idle", "iowait")
    before, after = (SimpleNamespace(**dict.fromkeys(names, 5.0)) for _ in range(2))
    assert stolen(before, after) == 0
    after.idle, after.iowait, after.user, after.softirq, after.steal = 90.0, 9.0, 10.0, 6.0, 7.0
    assert stolen(before, after) == 0.25
    assert stolen(psutil.cpu_times(), psutil.cpu_times()) >= 0  # this machine counts all of them


def test_higher_rates_are_better() -> None:
    before, less, more = (_table(redelastic=rate, theirs=10) for rate in (10, 5, 20))
    before.unit = less.unit = more.unit = "/s"
    assert _lost(before, less) == ["How long?, 2, theirs / redelastic: 1 x before, 2 x now"]
    assert not _lost(before, more)


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


def test_costs_below_the_heartbeats_spread_are_noise() -> None:
    heartbeats = [4e-5, 5e-5, 6e-5]  # seconds each, three times over
    assert beyond_heartbeats(0.13, 1000, heartbeats) == [pytest.approx(0.08)]
    assert beyond_heartbeats(0.065, 1000, heartbeats) == [], "15 ms, beside heartbeats of 40 to 60 ms"
    assert beyond_heartbeats(0.04, 1000, heartbeats) == [], "less than nothing"
    assert beyond_heartbeats(0.0, 0, heartbeats) == [], "no heartbeat, and no time that the kernel counts"


@pytest.mark.parametrize("unknown", [{}, {"lose": 0.0}])
def test_costs_within_noise_set_no_limit(unknown: dict[str, float]) -> None:
    costs = {"form": 1e-4, "beat": 1e-4, "complete": 0.0, "tell": 1e-5, "keys": 1e3, "connection": 1e3}
    table = limits(costs | unknown)
    bound = "a dead node is known everywhere within 100 ms of its lease (I7)"
    assert table.cells.pop(bound) == {"nodes": "within noise"}
    found = [cells["nodes"] for cells in table.cells.values()]
    assert [cell.median for cell in found if isinstance(cell, Spread)] == [5e3, 1e4, 1e4, 2e4, 1e5, 2.7e6]
    assert len(found) == 6


def test_what_did_not_come_back_each_time_has_no_median() -> None:
    assert summed_up([3.0, 1.0, 2.0]) == [1.0, 2.0, 3.0]
    assert summed_up([5.06, "not within 30 s", 6.0]) == "not within 30 s, 1 of 3 times; else 5.06 s"
    assert summed_up(["not within 30 s"]) == "not within 30 s"


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


def test_noise_is_no_share_of_a_target() -> None:
    table = _table(redelastic=-0.1)
    table.targets["2"] = 0.1
    *_, row = summary([("t", table)])
    assert row == "| How long? | nodes: 2 | at most 100 ms | -100 ms | within noise |  | `t` |"


def test_kept_results_replace_those_before(tmp_path: Path) -> None:
    table, other = _table(redelastic=1, theirs=2), _table(redelastic=3)
    table.targets["2"], other.targets["2"] = 0.5, 4
    readme, page = tmp_path / "README.md", tmp_path / "targets.md"
    readme.write_text(f"# Benchmarks\n\n{BEGIN}\nold\n{END}\n\nthe end\n")
    page.write_text(targets("", {"start": document("start", [other]), "store": document("store", [other])}))
    for _ in range(2):
        keep({"store": document("store", [table])}, tmp_path, readme)
        said = readme.read_text()
        assert said.startswith("# Benchmarks\n")
        assert said.endswith("\n\nthe end\n")
        assert "old" not in said
        assert "1 of 2 [targets]" in said
        assert said.count("**missed**") == 1
        assert "[store](results/store.md)" in said
        assert [line.split("`")[1] for line in page.read_text().splitlines()[4:]] == [
            "python -m benchmarks.store",
            "python -m benchmarks.start",
        ]
        assert "| 2 | 1 s | 2 s · 2 x | 500 ms |" in (tmp_path / "store.md").read_text()


def test_the_readme_agrees_with_the_kept_results() -> None:
    assert {path.stem for path in RESULTS.iterdir()} == {"targets", *BENCHMARKS}
    assert with_results(README.read_text(), RESULTS) == README.read_text()
