"""The documentation says what the program does: its quotes, options, settings, exit codes, events and variables."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import io
import re
import shlex
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from redelastic.agent import launch
from redelastic.cli import common
from redelastic.cli.status.view import Screen
from redelastic.monitoring.events import BY_SCRIPTS, KINDS, Completed, Lost, Progressed, Started
from redelastic.monitoring.history import replay
from redelastic.monitoring.records import Node, Run
from redelastic.monitoring.report import describe
from redelastic.rendezvous.settings import Settings
from tests.support.commands import run_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCE = Path(launch.__file__).parents[1]
MIB = 2**20
# Options in our pages that are other programs'.
OTHERS = {
    *("--help", "--version", "--system-site-packages", "--index-url", "--dist", "--from-file", "--build", "--scale"),
    *("--rm", "--no-recreate", "--volumes", "--profile", "--quick", "--seed", "--minutes", "--server-faults"),
    *(
        "--operations",
        "--rendezvous",
        "--checkpoint",
        "--pace",
        "--strict",
        "--keep",
        "--no-cache-dir",
        "--no-compile",
        "--upgrade-deps",
        "--no-deps",
        "--simulated",
    ),
    *("--real", "--simulated"),
    *("--secret", "--redis", "--hostfile", "--deepspeed", "--local", "--dump", "--job"),
    *("--save", "--load", "--save-interval", "--exit-signal-handler", "--exit-signal", "--ckpt-format"),
    *("--global-batch-size",),
}


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(kind: str) -> Iterator[tuple[Path, str]]:
    """The fenced blocks of a kind in all pages."""
    for page in PAGES:
        for body in re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            yield page, body


def rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in read(page).splitlines() if line[:1] == "|"
    ]


def code(text: str) -> list[str]:
    """What a text has in backquotes."""
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """The module that builds pages of the site."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_short_and_has_its_commands() -> None:
    text = read("README.md")
    assert len(text.splitlines()) < 150
    for marker in ("<!-- demo -->", "<!-- test -->"):
        assert re.search(re.escape(marker) + r"\n```bash\n.+?```", text, re.DOTALL), marker


def test_links_in_readme_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read("README.md")):
        assert (ROOT / target).exists(), target


# -- quotes


def member(rank: int, name: str, pid: int, cpu: float) -> Node:
    worker = {"local_rank": 0, "rank": rank, "pid": pid, "step": 56, "idle": 0.0}
    listed = {"name": name, "host": name, "state": "running", "cpu": cpu, "memory": 448 * MIB, "workers": [worker]}
    return Node(f"{name}-{pid}-{0:012x}", "member", rank, 1.5, 0.0, "", listed)


def of(at: str, node: str, epoch: int) -> dict[str, Any]:
    """When an event happened, today, and to which node."""
    seconds = datetime.fromisoformat(f"{datetime.now(timezone.utc):%Y-%m-%d}T20:14:{at or '00'}+00:00").timestamp()
    return {"time": seconds, "epoch": epoch, "size": 2, "node": f"{node}-{0:012x}"}


def test_the_quoted_status_is_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    run = Run(
        run_id="night", epoch=2, size=2, min_nodes=1, max_nodes=3, age=7.7, broken=None, closed=None, stopped=False,
        deadline=None, lease=1.5, restarts=0, idle=0, failures={}, barred=(),
        nodes=(member(0, "alpha", 5521, 0), member(1, "beta", 5522, 4)),
    )  # fmt: skip
    first = tuple(of("", name, 1)["node"] for name in ("alpha-5521", "beta-5522", "gamma-5520"))
    events = (
        Completed(**of("01.000", "alpha-5521", 1), because="max_nodes", members=first),
        Progressed(**of("04.000", "alpha-5521", 1), step=1),
        Lost(**of("55.257", "gamma-5520", 1), cause="lease", silent_ms=1500),
        Completed(**of("55.257", "alpha-5521", 2), because="all_joined", members=first[:2]),
        Started(**of("55.271", "alpha-5521", 2), rank=0),
        Started(**of("55.271", "beta-5522", 2), rank=1),
        Progressed(**of("57.690", "alpha-5521", 2), step=37, last_step=36),
    )
    out = io.StringIO()
    screen = Screen(Console(file=out, width=100, highlight=False, markup=False), rows=25, workers=False)
    screen.print(describe(run, events, time.time(), replay(events, events[2].time + 7.7)))
    printed = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    assert f"```console\n$ redelastic status night\n{printed}```" in read("docs/how-to/on-call.md")


QUOTED = [
    (page.name, prompt, output)
    for page, body in blocks("console")
    for prompt, output in re.findall(r"^\$ (redelastic .+)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE)
    if prompt != "redelastic status night"
]


@pytest.mark.parametrize(("page", "prompt", "output"), QUOTED, ids=[prompt for _, prompt, _ in QUOTED])
def test_the_quoted_errors_are_what_is_printed(page: str, prompt: str, output: str) -> None:
    done = run_command(*shlex.split(prompt)[1:])
    assert (done.out + done.err) == output, page


def test_a_failed_preload_is_called_what_the_log_calls_it() -> None:
    [warning] = re.findall(r'log.warning\("(Nothing is preloaded[^%:]+): %s', (SOURCE / "workers/warm.py").read_text())
    assert f"`{warning}`" in read("docs/reference/agent.md")


# -- options, settings, and the like


def test_every_option_in_the_pages_exists(hooks: ModuleType) -> None:
    known = {option for parser in hooks.parsers().values() for option in parser._option_string_actions} | OTHERS
    for page in PAGES:
        listed = re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"<!--.*?-->", "", page.read_text()))
        assert {option.rstrip("-") for option in listed} <= known, page


def test_the_settings_are_those_of_the_page() -> None:
    listed = {code(cells[0])[0]: cells[1] for cells in rows("docs/reference/settings.md") if code(cells[0])}
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    assert listed.keys() == fields.keys() - {"run_id", "min_nodes", "max_nodes", "local_addr"}
    for name, default in listed.items():
        if name != "node_name":
            expected = fields[name].default
            assert default == (f"{expected:g}" if isinstance(expected, int | float) else expected or ""), name


def test_the_exit_codes_are_those_of_the_page() -> None:
    listed = {int(cells[0]) for cells in rows("docs/reference/exit-codes.md") if cells[0].isdecimal()}
    agent = {
        launch.OK,
        launch.FAILED,
        launch.DRAINED,
        launch.STOPPED,
        launch.REFUSED,
        launch.NO_PROGRESS,
        launch.UNUSED,
    }
    assert listed == agent | {common.NO, common.USAGE, common.UNREACHABLE, common.UNKNOWN, common.UNMEASURED, 130}


def test_scripts_record_the_events_that_are_defined() -> None:
    scripts = "".join(path.read_text() for path in (SOURCE / "lua").glob("*.lua"))
    recorded = set(re.findall(r"record(?:_break)?\((?:\w+, )?'(\w+)'", scripts)) | {"closed", "stopped", "cleared"}
    assert {KINDS[name] for name in recorded} == set(BY_SCRIPTS)


def test_each_field_of_an_event_is_documented(hooks: ModuleType) -> None:
    missing = []
    for name, kind in KINDS.items():
        described = "; ".join(text for each in kind.__mro__[:-1] for text in hooks.documented(each)[1])
        missing += [f"{name}.{one.name}" for one in dataclasses.fields(kind) if f"`{one.name}`" not in described]
    assert missing == []


def test_each_claim_of_security_names_tests() -> None:
    """What begins with two colons is in the file named before it."""
    claims = [row for row in rows("SECURITY.md") if "::" in row[-1]]
    assert len(claims) > 20
    for *_, cell in claims:
        file = ""
        for named in code(cell):
            path, *scopes, test = named.split("::")
            file = path or file
            body: Any = ast.parse(read(f"tests/{file}"))
            for scope in scopes:
                [body] = [part for part in body.body if isinstance(part, ast.ClassDef) and part.name == scope]
            assert test in [part.name for part in body.body if isinstance(part, ast.FunctionDef)], (file, named)


def test_actions_are_pinned_by_hash() -> None:
    """A tag may be moved to other code, which would run with the repository's rights."""
    used = [line for file in (ROOT / ".github/workflows").glob("*.yml") for line in file.read_text().splitlines()]
    used = [line for line in used if "uses:" in line]
    assert used
    assert [line for line in used if not re.search(r"@[0-9a-f]{40} # v\d", line)] == []


def test_the_job_that_may_publish_runs_no_code_of_the_repository() -> None:
    """Only actions that are pinned by hash see the identity that PyPI trusts."""
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
    workflow = yaml.safe_load(read(".github/workflows/publish.yml"))
    assert workflow["permissions"] == {}
    trusted = {name: job for name, job in workflow["jobs"].items() if "id-token" in job["permissions"]}
    assert list(trusted) == ["publish"]
    assert trusted["publish"]["environment"] == "pypi"
    used = [step["uses"].partition("@")[0] for step in trusted["publish"]["steps"]]
    assert used == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert trusted["publish"]["steps"][-1]["with"] == {"attestations": True}, "and no password"


def test_no_sentence_is_parsed() -> None:
    """What crosses a process is data: nobody who reads events or records matches text."""
    readers = [*(SOURCE / "monitoring").glob("*.py"), *(SOURCE / "dashboard").glob("*.py"), SOURCE / "cli" / "drain.py"]
    matching = {path.name for path in readers if "import re\n" in path.read_text()}
    assert matching <= {"report.py", "wording.py", "app.py", "standalone.py"}, "of Xids, node ids, addresses, modules"


def test_the_variables_of_the_page_are_read_or_set() -> None:
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    listed = {name for cells in rows("docs/reference/environment.md") for name in code(cells[0]) if name.isupper()}
    ours = {name for name in listed if name.startswith("REDELASTIC_")}
    assert len(ours) >= 5
    assert [name for name in ours if f'"{name}"' not in source] == []


def test_each_metric_has_a_row(hooks: ModuleType) -> None:
    names = [re.findall(r"`(\w+)`", row)[0] for row in hooks.metric_rows()]
    assert len(names) == len(set(names)) > 20
    assert {"redelastic_restarts_total", "redelastic_worker_step", "redelastic_gpu_xids_total"} <= set(names)
