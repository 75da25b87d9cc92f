"""One host's part in a preflight: it meets the others, goes through the steps with them, and gets what came of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Left, Outlier, Preflight
from redelastic.monitoring.sentences import sentence
from redelastic.redis.errors import RedelasticError
from redelastic.redis.keys import RunKeys
from redelastic.rendezvous.handler import RedisRendezvousHandler, handler_from_parameters
from redelastic.store import RedisStore

from .meeting import Meeting
from .options import Options, measure_of
from .probe import STORE_TTL, Probe
from .schedule import Report, Step
from .verdict import Verdict, judge

SUFFIX: Final = "-preflight"  # of the run in which the hosts of a job meet
READY_TIMEOUT: Final = 120.0  # for the import of torch, in seconds
MAX_EVENTS: Final = 16  # of outliers, in the job's log


class Host:
    """This host, for one preflight of a job's hosts.

    Args:
        params: of the job's rendezvous.
        options: how to measure.

    Raises:
        RendezvousConnectionError: Redis cannot be reached, or refuses the login.
        ValueError: a parameter is wrong.
    """

    def __init__(self, params: RendezvousParameters, options: Options) -> None:
        place = params.endpoint, params.run_id + SUFFIX, params.min_nodes, params.max_nodes, params.local_addr
        handler = handler_from_parameters(RendezvousParameters("redis", *place, **params.config))
        if not isinstance(handler, RedisRendezvousHandler):
            raise ValueError("A preflight needs the native rendezvous: remove protocol=dynamic.")  # noqa: TRY004
        handler.exports_environment = False
        self._handler, self._params, self._options = handler, params, options

    def close(self) -> None:
        """Leave the others; if they have not yet met, :meth:`run` ends with ``RendezvousClosedError``."""
        self._handler.end(Left(cause="finished"), "goes on")

    def run(self) -> dict[str, Any]:
        """Meet the others and measure.

        Returns:
            What came of it, the same on all hosts but for ``self``: see :func:`_document`.

        Raises:
            RendezvousError: the hosts did not meet: too few came in time, or Redis refuses this one.
            DistError: Redis could not be reached while they measured.
        """
        settings, handler, started = self._handler.settings, self._handler, time.monotonic()
        handler.address.export_interface()
        tls = {name: getattr(settings, name) for name in ("ca_cert", "ssl_cert", "ssl_cert_key")}
        keys: dict[str, Any] = {"run_id": settings.run_id, "key_prefix": settings.key_prefix}
        setting = {"backend": self._options.backend, "endpoint": self._params.endpoint, "tls": tls, **keys}
        with contextlib.closing(Probe(setting)) as probe:
            probe.wait_until_ready(READY_TIMEOUT)  # a probe that is not will say so in its first step
            info = handler.next_rendezvous()
            entered = handler.node.view.round
            assert entered is not None  # noqa: S101 - it has just been entered
            name = f"preflight-{entered.epoch}-{entered.completed_at}"  # the loss of a host would end the round's store
            connection = handler.backend.connection
            limits: dict[str, Any] = {"timeout": settings.read_timeout, "ttl": STORE_TTL}
            with contextlib.closing(RedisStore(connection, **keys, name=name, **limits)) as store:
                meeting = Meeting(store, info.rank, settings.node_name, info.world_size)
                document, is_own = self._go_through(meeting, probe, info.rank, name)
            own = document["hosts"][info.rank]
            job = RunControl(connection, RunKeys(self._params.run_id, settings.key_prefix))
            with contextlib.suppress(RedelasticError):  # the measuring does not depend on that
                if is_own:  # the first to know tells the job
                    _tell(job, document, settings.ttl)
                elif document["excluded"] and own["outlier"]:  # before it looks whether it is
                    job.exclude(own["host"], settings.ttl)
        return {**document, "self": own, "seconds": round(time.monotonic() - started, 3)}

    def _go_through(self, meeting: Meeting, probe: Probe, host: int, name: str) -> tuple[dict[str, Any], bool]:
        """Go through all steps; returns what came of it, and whether this host has concluded that."""
        options, fewest = self._options, self._handler.settings.min_nodes
        step: Step | None = meeting.first()
        while step is not None:
            measures = 2 + len(options.folders) if step.kind == "own" else 1
            deadline = time.monotonic() + measures * options.timeout
            group = f"{name}/{meeting.number}"
            found = _measure(probe, step, host, options, group) if host in step.hosts else {}
            step = meeting.report(found, deadline)
        return meeting.agree(lambda steps, names: _document(steps, names, options, fewest))


def _measure(probe: Probe, step: Step, host: int, options: Options, group: str) -> Report:
    """Do this host's part of a step."""

    def ask(do: str, **more: Any) -> dict[str, Any]:
        return probe.ask(time.monotonic() + options.timeout, do=do, **more)

    if step.kind == "own":
        answers = {name: ask(name) for name in ("compute", "memory")}
        answers |= {f"write:{folder}": ask("write", folder=folder) for folder in options.folders}
        return {name: answer.get("value", answer.get("error", "")) for name, answer in answers.items()}
    if step.kind == "pairs":
        pair = next(pair for pair in step.pairs if host in pair)
        return ask("link", group=f"{group}/{pair[0]}", rank=pair.index(host), size=2)
    rank = step.hosts.index(host)
    return ask("all_reduce", group=group, rank=rank, size=len(step.hosts), bytes=options.size)


def _document(steps: list[Step], names: list[str], options: Options, fewest: int) -> dict[str, Any]:
    """What came of it, as JSON; outliers are excluded only where ``fewest`` hosts are left.

    Returns:
        hosts: by their number, each with name, figures by measure, and whether it is an outlier; medians by measure;
        outliers, with text in words; links that are bad where neither end is known to be; unmeasured: what no host
        could measure, in words; group: the all-reduce; excluded: whether the outliers are.
    """
    verdict: Verdict = judge(len(names), steps, options.required)
    outliers = []
    for found in verdict.outliers:
        fields = {**asdict(found), "host": names[found.host], "number": found.host}
        fields["unit"] = measure_of(found.measure).unit if found.value is not None else ""
        outliers.append({**fields, "text": sentence(outlier_event(fields))})
    bad = {found.host for found in verdict.outliers}
    return {
        "hosts": [
            {"host": name, "number": number, "figures": _rounded(verdict.figures[number]), "outlier": number in bad}
            for number, name in enumerate(names)
        ],
        "medians": _rounded(verdict.medians),
        "outliers": outliers,
        "links": [
            {**asdict(link), "source": names[link.source], "target": names[link.target]} for link in verdict.links
        ],
        "unmeasured": list(verdict.unmeasured),
        "group": dict(verdict.group),
        "excluded": options.exclude and bool(bad) and len(names) - len(bad) >= fewest,
    }


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """To four digits: every host reads the document."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def outlier_event(fields: Mapping[str, Any]) -> Outlier:
    """An outlier of a document as an event of the job."""
    known = ("measure", "value", "median", "required", "unit", "reason")
    return Outlier(node=fields["host"], **{name: fields[name] for name in known})


def _tell(control: RunControl, document: Mapping[str, Any], ttl: float) -> None:
    """Exclude the outliers if that was asked for, and record in the job's log what came of it."""
    outliers = document["outliers"]
    names = tuple(dict.fromkeys(outlier["host"] for outlier in outliers))
    for name in names if document["excluded"] else ():
        control.exclude(name, ttl)
    for outlier in outliers[:MAX_EVENTS]:
        control.note(outlier_event(outlier))
    control.note(Preflight(hosts=len(document["hosts"]), outliers=names, excluded=document["excluded"]))
