"""Adds to the site what lives elsewhere: the repository's documents, its examples, the commands' help."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Final

from redelastic.monitoring import events

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
# They keep their places in the repository, and have the same ones on the site.
INCLUDED: Final = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/*.md",
    "benchmarks/results/*.md",
    "compose.yaml",
    "examples/*",
    "redelastic/*.md",
)
LINK: Final = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the included files and the generated pages."""
    from mkdocs.structure.files import File  # noqa: PLC0415  # the functions below need no mkdocs

    for pattern in INCLUDED:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    for name, text in generated():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links that are right in the repository lead to the same page of the site."""
    del config
    generated_from = page.file.generated_by is not None
    here = PurePosixPath(page.file.src_uri)
    place = here if generated_from else PurePosixPath("docs") / here

    def on_site(link: re.Match[str]) -> str:
        target = normpath(place.parent / link[2]).removeprefix("docs/")
        found = next((uri for uri in (target, f"{target}/README.md") if files.get_file_from_path(uri)), None)
        return f"{link[1]}{relpath(found, here.parent)}{link[3] or ''})" if found else link[0]

    return LINK.sub(on_site, markdown)


def generated() -> Iterator[tuple[str, str]]:
    """The pages written here: their names on the site, and their text."""
    os.environ["COLUMNS"] = "88"
    for name, parser in parsers().items():
        yield f"reference/commands/{name}.md", f"# redelastic {name}\n\n```text\n{parser.format_help()}```\n"
    yield "reference/events.md", events_page()
    yield "reference/metrics.md", METRICS + "\n".join(metric_rows()) + "\n"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    from redelastic.cli import make_parser, run, run_options  # noqa: PLC0415

    _, commands = make_parser()
    return {**commands.choices, run.NAME: run_options.make_parser()}


EVENTS: Final = """\
# Events

A run records what happens in it, as events with typed fields. `redelastic events`, `timeline` and `dashboard` show
them in words; `--json` prints the fields below, `text` (the words) and `detail` (lines such as stacks). Redis keeps the
last 10,000 or so, and at most 8 MiB.

Every event has `event` (its kind), `id`, `time` (seconds since 1970, on the server's clock), `epoch` and `size` (of the
last round), and `node`. `breaks` says that the event broke the round. When more than 16 nodes join, start, fail, hang,
save, leave or the like at once, one event covers up to 64 of them, a second or two later: `nodes` lists them, and the
other fields come from the first.

Times that end in `_ms` are milliseconds. A number that is not known is null, a text that is not known is empty. The
`version` of a JSON document, 1 today, changes when the meaning of a field does.

## Recorded by the protocol's scripts

In the same atomic step as the change itself, and so exactly once:

{by_scripts}

## Recorded by agents and handlers

What only they can see, at least once:

{by_agents}

## The worker that failed first

Where a worker failed, `failed`, `hung`, `left`, `closed` and `stopped` also have:

{of_worker}
"""


def events_page() -> str:
    """The reference of events, from the docstrings of their kinds."""
    fields = documented(events.WorkerFailure)[1]
    return EVENTS.format(
        by_scripts=event_table(events.BY_SCRIPTS),
        by_agents=event_table(events.BY_AGENTS),
        of_worker="\n".join(["| field | |", "|---|---|", *(f"| {name} | {text} |" for name, text in fields.items())]),
    )


def event_table(kinds: Iterable[type[events.Event]]) -> str:
    """A row for each kind."""
    names = {kind: name for name, kind in events.KINDS.items()}
    rows = ["| event | what happened | its fields |", "|---|---|---|"]
    for kind in kinds:
        meaning, fields = documented(kind)
        if kind is events.Stopped:
            fields = documented(events.Closed)[1]
        described = "; ".join(f"{name}: {text}" for name, text in fields.items())
        rows.append(f"| `{names[kind]}` | {meaning} | {described} |")
    return "\n".join(rows)


def documented(kind: type) -> tuple[str, dict[str, str]]:
    """The first sentence of a class's docstring, and what it says of each attribute, by the attributes' names."""
    summary, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    entries = re.split(r"\n(?=    \w)", "\n" + attributes.rstrip())
    pairs = (entry.strip().partition(": ") for entry in entries if entry.strip())
    known = {", ".join(f"`{name}`" for name in names.split(", ")): " ".join(text.split()) for names, _, text in pairs}
    return summary.rstrip("."), {names: text.rstrip(".") for names, text in known.items()}


METRICS: Final = """\
# Metrics

`redelastic run --health-port=8080` serves them at `/metrics`, each with the labels `run_id` and `node`, the
node's name (`--node-name`), which stays the same when it starts again. Give each agent of a host a name of its own.
A value that is not known has no sample. [grafana.json](../examples/grafana.json) is a Grafana dashboard on them.

| metric | type | more labels | meaning |
|---|---|---|---|
"""


def metric_rows() -> Iterator[str]:
    """A row for each metric that the health endpoint serves."""
    from redelastic.host import health_endpoint  # noqa: PLC0415

    class Node:
        """One that knows everything."""

        def status(self) -> dict[str, object]:
            known = {metric.field: 1 for metric in (*health_endpoint.NODE_METRICS, *health_endpoint.WORKER_METRICS)}
            gpu = {metric.field: 1 for metric in health_endpoint.GPU_METRICS} | {"xids": {"79": 1}}
            return {**known, "state": "running", "workers": [known], "gpus": [gpu]}

        def stalled(self) -> str:
            return ""

        unready = stalled

    for family in health_endpoint._StatusCollector(Node()).collect():  # noqa: SLF001  # the only list of all of them
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = [key for sample in family.samples[:1] for key in sample.labels if key not in ("run_id", "node")]
        yield f"| `{name}` | {family.type} | {', '.join(f'`{label}`' for label in labels)} | {family.documentation} |"
