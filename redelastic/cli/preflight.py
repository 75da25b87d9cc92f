"""``redelastic preflight``: measure the hosts of a job and their links, and name the one that is slow or broken."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from redelastic.logs import say
from redelastic.monitoring.wording import clean, count
from redelastic.preflight.options import MEASURES, Options, measure_of, shown

from .common import NO, OK, UNMEASURED, UNREACHABLE, USAGE, node_counts
from .output import add_json_argument, open_console, write_json

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

NAME = "preflight"
SUMMARY = "measure the hosts of a job and their links, and name the bad one"
DESCRIPTION = """\
Start it on all hosts of a job, with the same options. They meet, and each measures
itself; then links are measured in pairs with changing partners, which tells a slow host
from its partner; then all sum one tensor. Every host prints the hosts that stand out,
with the median of all beside their values. A host that hangs or dies costs the others
the time limit of one measure.

exit codes:
  0  no host stands out
  1  a host stands out, or a link is bad
  2  wrong arguments
  3  Redis cannot be reached, or refuses the login
  5  something could not be measured: too few hosts came, or it failed on all"""
MAX_ROWS: Final = 32  # hosts of a table; with more, it has only the outliers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add(
        "--rdzv-endpoint",
        metavar="URL",
        default="",
        help="host:port or URL of Redis (default: $REDELASTIC_REDIS_URL, or localhost)",
    )
    add("--rdzv-id", metavar="ID", required=True, help="run id of the job; the hosts meet in ID-preflight")
    add("--nnodes", metavar="N", required=True, help="how many hosts take part: N, or MIN:MAX")
    add("--rdzv-conf", metavar="NAME=VALUE,…", default="", help="settings of the rendezvous, as for redelastic run")
    add("--local-addr", metavar="ADDRESS", help="this host's address, name or interface for its peers")
    add("--node-name", metavar="NAME", help="this host's name (default: its hostname)")
    add("--exclude", action="store_true", help="keep hosts that stand out out of the job until they are readmitted")
    add("--path", action="append", default=[], metavar="FOLDER", help="write here, too; may be repeated")
    add("--backend", choices=("gloo", "nccl"), default="gloo", help="gloo measures CPUs, nccl GPUs (default: gloo)")
    add("--size", type=int, default=64, metavar="MIB", help="tensor of the all-reduce (default: 64)")
    add("--timeout", type=float, default=30.0, metavar="S", help="time limit of each measure (default: 30)")
    required = "name also hosts that are worse than this, such as send=10; may be repeated"
    add("--require", action="append", default=[], metavar="MEASURE=VALUE", help=required)
    add_json_argument(
        parser,
        "hosts (host, number, figures by measure,\noutlier), medians, outliers (host, number, measure, value, median, "
        "required, unit,\nreason, text), links (source, target, measure, value, median, reason), unmeasured,\n"
        "group (seconds, bandwidth, hosts), excluded, by, self, seconds.\n\n"
        + "".join(f"{name:8} {measure.what}, {measure.unit}\n" for name, measure in MEASURES.items())
        + "\nOther units:",
    )


def options_of(arguments: argparse.Namespace) -> Options:
    """How to measure.

    Raises:
        ValueError: an option is wrong.
    """
    required = {}
    for text in arguments.require:
        name, _, value = text.partition("=")
        if name.partition(":")[0] not in MEASURES or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
            raise ValueError(f"--require={text} is invalid: give one of {', '.join(MEASURES)}, = and a number.")
        required[name] = float(value)
    if not 1 <= arguments.timeout <= 3600:
        raise ValueError(f"--timeout={arguments.timeout:g} is out of range: it must be 1 to 3600.")
    if not 1 <= arguments.size <= 16384:
        raise ValueError(f"--size={arguments.size} is out of range: it must be 1 to 16384.")
    folders = tuple(str(Path(folder).absolute()) for folder in arguments.path)
    measures: dict[str, Any] = {"backend": arguments.backend, "required": required, "folders": folders}
    return Options(timeout=arguments.timeout, size=arguments.size << 20, exclude=arguments.exclude, **measures)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    from redelastic.logs import only_errors_of, set_up_logging
    from redelastic.torch_internals import require_torch

    try:
        require_torch()
    except ImportError as e:
        say(f"redelastic {NAME}: {e}")
        return USAGE
    set_up_logging(logging.getLogger())
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

    from redelastic.preflight.host import Host

    options = options_of(arguments)
    try:
        quiet = only_errors_of("redelastic.rendezvous")  # it says that hosts leave, as they do at the end
        with quiet, contextlib.closing(Host(_parameters(arguments), options)) as host:
            found = host.run()
    except (RendezvousError, DistError) as e:
        say(f"redelastic {NAME}: {clean(str(e))}")
        return UNREACHABLE if isinstance(e, RendezvousConnectionError) else UNMEASURED
    if arguments.json:
        write_json(found)
    else:
        show(found)
    return NO if found["outliers"] or found["links"] else UNMEASURED if found["unmeasured"] else OK


def _parameters(arguments: argparse.Namespace) -> RendezvousParameters:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    min_nodes, max_nodes = node_counts(arguments.nnodes)
    config: dict[str, Any] = {}
    for pair in filter(None, arguments.rdzv_conf.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--rdzv-conf={arguments.rdzv_conf} is invalid: use NAME=VALUE,…")
        config[name.strip()] = value.strip()
    if arguments.node_name is not None:
        config["node_name"] = arguments.node_name
    place = arguments.rdzv_endpoint, arguments.rdzv_id, min_nodes, max_nodes, arguments.local_addr
    return RendezvousParameters("redis", *place, **config)


def show(found: Mapping[str, Any]) -> None:
    """Print what came of a preflight."""
    from rich.table import Table
    from rich.text import Text

    hosts: Sequence[Mapping[str, Any]] = found["hosts"]
    names = list(found["medians"])
    table = Table.grid(padding=(0, 2))
    for column in range(1 + len(names)):
        table.add_column(no_wrap=True, justify="right" if column else "left")
    table.add_row("host", *(f"{clean(name)} {measure_of(name).unit}" for name in names), style="bold")
    bad = {(outlier["number"], outlier["measure"]) for outlier in found["outliers"]}
    for host in hosts if len(hosts) <= MAX_ROWS else [host for host in hosts if host["outlier"]]:
        cells = [
            Text(f"{value:.3g}" if (value := host["figures"].get(name)) is not None else "-", style)
            for name in names
            for style in ["bold red" if (host["number"], name) in bad else ""]
        ]
        table.add_row(Text(clean(host["host"]), "bold red" if host["outlier"] else ""), *cells)
    table.add_row("median", *(f"{found['medians'][name]:.3g}" for name in names), style="dim")
    console = open_console()
    console.print(table)
    if found["group"]:
        group = found["group"]
        took = f"{group['seconds']:.3g} s, {group['bandwidth']:.3g} Gbit/s"
        console.print(f"all-reduce of {count(round(group['hosts']), 'host')}: {took}")
    for outlier in found["outliers"]:
        console.print(Text(clean(f"{outlier['host']}: {outlier['text']}"), "bold red"))
    for link in found["links"]:
        where = f"{link['source']} to {link['target']}"
        value, median = (shown(link["measure"], link[name]) for name in ("value", "median"))
        figure = link["reason"] or f"{value}, median {median}"
        console.print(Text(clean(f"link {where}: {link['measure']}: {figure}; which end is bad is not known"), "red"))
    for what in found["unmeasured"]:
        console.print(Text(clean(f"not measured: {what}"), "yellow"))
    if found["excluded"]:
        console.print("excluded until `redelastic readmit`, where nodes run with --exclude or --max-failed-rounds")
    verdict = "no outlier" if not found["outliers"] else count(len({o["number"] for o in found["outliers"]}), "outlier")
    console.print(f"{count(len(hosts), 'host')}, {verdict}, {found['seconds']:.1f} s")
