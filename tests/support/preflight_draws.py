"""Preflights with hosts made bad at random: how often bad and good hosts are named, as a table.

Usage: python -m tests.support.preflight_draws --simulated 200 --real 16 (real hosts need root, and minutes).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from redelastic.preflight.verdict import judge
from tests.support.namespaces import LINK, Network, NetworkServer, both_ways
from tests.support.preflight_job import Hosts
from tests.support.simulated_hosts import Host, Site

Fault = Callable[[Network, Hosts, str, Sequence[str], ExitStack], None]


# -- real faults: each starts the hosts, one of which it makes bad


def _nothing(network: Network, hosts: Hosts, bad: str, names: Sequence[str], faults: ExitStack) -> None:
    del network, bad, faults
    hosts.start(*names)


def _sends_slowly(network: Network, hosts: Hosts, bad: str, names: Sequence[str], faults: ExitStack) -> None:
    del faults
    with network.inside(bad):
        _limit_rate(LINK)
    hosts.start(*names)


def _receives_slowly(network: Network, hosts: Hosts, bad: str, names: Sequence[str], faults: ExitStack) -> None:
    del faults
    with network.inside("router"):
        _limit_rate(bad)
    hosts.start(*names)


def _limit_rate(device: str) -> None:
    limit = ["root", "tbf", "rate", "200mbit", "burst", "256kb", "latency", "100ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", device, *limit], check=True)


def _is_far(network: Network, hosts: Hosts, bad: str, names: Sequence[str], faults: ExitStack) -> None:
    faults.enter_context(network.slow(bad, 0.02))
    hosts.start(*names)


def _loses_packets(network: Network, hosts: Hosts, bad: str, names: Sequence[str], faults: ExitStack) -> None:
    faults.enter_context(network.slow(bad, 0.0, 0.05))
    hosts.start(*names)


def _hears_nobody(network: Network, hosts: Hosts, bad: str, names: Sequence[str], faults: ExitStack) -> None:
    ways = both_ways(bad, [name for name in names if name != bad])
    faults.enter_context(network.cut([way for way in ways if way[1] == bad]))
    hosts.start(*names)


def _is_throttled(network: Network, hosts: Hosts, bad: str, names: Sequence[str], faults: ExitStack) -> None:
    del network
    members = faults.enter_context(throttled(0.1))
    hosts.start(*names)
    members.write_text(str(hosts.pid(bad)))  # before the host starts the process that measures


def _hangs(network: Network, hosts: Hosts, bad: str, names: Sequence[str], faults: ExitStack) -> None:
    del network, faults
    hosts.start(*names)
    hosts.wait_for_step(1)
    hosts.freeze(bad)


FAULTS: Final[dict[str, Fault]] = {
    "sends at 200 Mbit/s": _sends_slowly,
    "receives at 200 Mbit/s": _receives_slowly,
    "20 ms away": _is_far,
    "loses 5 % of what it sends": _loses_packets,
    "hears no other host": _hears_nobody,
    "a tenth of a CPU": _is_throttled,
    "hangs": _hangs,
}


@contextmanager
def throttled(share: float) -> Iterator[Path]:
    """Make a cgroup with a share of one CPU; yields the path of its `cgroup.procs`."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if unified else "/sys/fs/cgroup/cpu") / f"redelastic-{uuid.uuid4().hex[:12]}"
    group.mkdir()
    quota = round(100_000 * share)
    if unified:
        (group / "cpu.max").write_text(f"{quota} 100000")
    else:
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    yield group / "cgroup.procs"
    for pid in (group / "cgroup.procs").read_text().split():  # a process killed a moment ago may still be there
        (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


def draw_real(rng: random.Random) -> tuple[str, int, set[str], list[str]]:
    """Run one preflight: the fault, the number of hosts (4 or 5), the bad ones, and which it named and why."""
    names = [f"vm-{letter}" for letter in "abcde"[: rng.choice((4, 5))]]
    kind, bad = rng.choice([*FAULTS, "none"]), rng.choice(names)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        network = opened.enter_context(Network("redis", *names))
        opened.enter_context(network.inside("redis"))
        server = opened.enter_context(NetworkServer(network.addresses["redis"]))
        endpoint = f"redis://:{server.password}@{server.endpoint}"
        options = (f"--nnodes={len(names)}", "--timeout=20", "--size=1")
        hosts = opened.enter_context(Hosts(server, endpoint, "drawn", folder, *options, network=network))
        FAULTS.get(kind, _nothing)(network, hosts, bad, names, opened)
        good = next(name for name in names if name != bad)
        document = hosts.results(good)[good].document
    return (
        kind,
        len(names),
        set() if kind == "none" else {bad},
        [f"{found['host']}: {found['text']}" for found in document["outliers"]],
    )


# -- simulated faults

SIMULATED: Final[dict[str, Callable[[random.Random], Host]]] = {
    "computes at 10 to 60 %": lambda rng: Host(compute=rng.uniform(0.1, 0.6)),
    "sends at 5 to 45 %": lambda rng: Host(send=rng.uniform(0.05, 0.45)),
    "receives at 5 to 45 %": lambda rng: Host(receive=rng.uniform(0.05, 0.45)),
    "1 to 50 ms away": lambda rng: Host(delay=rng.uniform(1, 50)),
    "reached by none": lambda _: Host(receive=0.0),
    "hangs in any step": lambda rng: Host(silent_in=rng.randrange(4)),
}


def draw_simulated(rng: random.Random) -> tuple[int, dict[int, str], set[int]]:
    """Simulate one preflight: the number of hosts, the bad ones with their faults, and those that it named.

    Up to a fifth are bad. The noise of all values is 2 to 15 % (one standard deviation).
    """
    number = rng.choice([*range(3, 17), 32, 64, 128, 1000])
    bad = {host: rng.choice([*SIMULATED]) for host in rng.sample(range(number), rng.randint(0, max(1, number // 5)))}
    site = Site([SIMULATED[bad[host]](rng) if host in bad else Host() for host in range(number)], rng=rng)
    site.noise = rng.uniform(0.02, 0.15)
    return number, bad, {outlier.host for outlier in judge(number, site.run()).outliers}


def table(faults: Counter[str], named: Counter[str], draws: int, good: int, wrong: int) -> str:
    """Markdown: how many hosts with each fault were named, and how many without one."""
    rows = [f"| {kind} | {named[kind]} of {faults[kind]} |" for kind in sorted(faults)]
    right, all_bad = named.total(), faults.total()
    precision = right / (right + wrong) if right + wrong else 1.0
    recall = right / all_bad if all_bad else 1.0
    last = f"| all {draws} draws: recall {recall:.3f}, precision {precision:.3f} | {right} of {all_bad} |"
    return "\n".join(["| bad hosts | named |", "|---|---:|", *rows, f"| good hosts | {wrong} of {good} |", last])


def main() -> None:
    """Draw, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in ("--simulated", 200), ("--real", 0), ("--seed", 1):
        parser.add_argument(option, type=int, default=default)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    faults, named, good, wrong = Counter[str](), Counter[str](), 0, 0
    for _ in range(given.simulated):
        number, bad, found = draw_simulated(rng)
        good += number - len(bad)
        faults.update(bad.values())
        named.update(kind for host, kind in bad.items() if host in found)
        wrong += len(found - set(bad))
    sys.stdout.write(f"Simulated:\n\n{table(faults, named, given.simulated, good, wrong)}\n\n")
    faults, named, good, wrong = Counter(), Counter(), 0, 0
    for _ in range(given.real):
        kind, number, expected, reasons = draw_real(rng)
        names = {reason.partition(":")[0] for reason in reasons}
        good += number - len(expected)
        sys.stdout.write(f"  {kind}: {sorted(expected)}, named {reasons}\n")
        sys.stdout.flush()
        faults.update([kind] * len(expected))
        named.update([kind] * len(expected & names))
        wrong += len(names - expected)
    if given.real:
        sys.stdout.write(f"Real:\n\n{table(faults, named, given.real, good, wrong)}\n")


if __name__ == "__main__":
    main()
