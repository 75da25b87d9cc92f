"""Where tests run the recipes of examples/: stand-ins for ssh, srun and scontrol on PATH, and for a kubelet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import ProxyHandler, build_opener

import psutil
import pytest
from typing_extensions import Self

from redelastic.monitoring.control import RunControl, UnknownRunError
from redelastic.monitoring.records import Node
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import URL_VARIABLE, parse_endpoint
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import find_binary, reserve_port
from tests.support.torchrun_job import REAPER, TOKEN

ACCURACY: Final = re.compile(r'"event": "done".*"accuracy": ([0-9.]+)')  # what examples print at their end
T = TypeVar("T")

LIMIT: Final = 150.0  # for anything to happen, in seconds
POLL: Final = 0.1  # in seconds: scanning all processes of the machine takes time

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
AWARE: Final = Path(__file__).parent / "workers" / "aware.py"

# Like sshd: a new session, without this environment, in another folder.
SSH: Final = f"""#!/bin/bash
while [[ $1 = -* ]]; do [[ $1 = -o ]] && shift; shift; done
cd / && exec env -i HOME="$HOME" PATH=/usr/bin:/bin OMP_NUM_THREADS=1 {TOKEN}="${TOKEN}" TEST_NODE="${{1#*@}}" \\
  setsid --wait bash -c "$2"
"""

# One task per node. As with Slurm's KillOnBadExit, a task that fails ends the others, unless --kill-on-bad-exit=0.
SRUN: Final = f"""#!{sys.executable}
import os, subprocess, sys
command = sys.argv[1:]
options = [command.pop(0) for one in sys.argv[1:] if one == command[0] and one.startswith("--")]
tasks = [
    subprocess.Popen(command, env=os.environ | {{"TEST_NODE": f"node{{n}}"}}, start_new_session=True)
    for n in range(int(os.environ["SLURM_NNODES"]))
]
codes = []
while len(codes) < len(tasks):
    _, status = os.wait()
    codes.append(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
    if codes[-1] and "--kill-on-bad-exit=0" not in options:
        for task in tasks:
            task.kill()
sys.exit(max(codes))
"""

# Redis overwrites its environment with a title, so `Site` knows it by its pid. It ends with its parent, unless a test
# sets REDIS_TIE. With REDIS_OPTIONS it gets a port of its own, where a cluster would give it an address of its own.
REDIS: Final = """#!/bin/bash
echo $$ >>redis.pids
exec ${{REDIS_TIE-setpriv --pdeathsig KILL}} {binary} "$@" $REDIS_OPTIONS
"""

SCONTROL: Final = '#!/bin/bash\necho "$@" >>scontrol.log\n'


class Site:
    """A folder in which recipes run, with stand-ins first on PATH; at the end no process is left.

    Args:
        folder: the folder.
        programs: the text of each stand-in, by name.
    """

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder, self._token = folder, uuid.uuid4().hex
        binaries = folder / "bin"
        binaries.mkdir()
        programs["redis-server"] = REDIS.format(binary=find_binary())
        for name, text in programs.items():
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        path = os.pathsep.join([str(binaries), str(Path(sys.executable).parent), os.environ["PATH"]])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("REDELASTIC_", "SLURM"))}
        self.environment = {**inherited, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", TOKEN: self._token}
        self._started: list[subprocess.Popen[bytes]] = []
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, TOKEN, self._token], stdin=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._reaper.communicate(timeout=LIMIT)
        for started in self._started:
            started.wait(LIMIT)

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program in the site's folder; its output is appended to `log`."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=self.folder,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def recipe(self, name: str, script: str | None = None) -> Path:
        """A copy of a recipe in the folder; with ``script``, edited as users do to train with another script."""
        text = (EXAMPLES / name).read_text()
        if script is not None:
            before, line, after = text.partition("\nscript=(")
            assert line, f"{name} has no line that says which script to train"
            text = f"{before}{line}{script})\n{after.partition(chr(10))[2]}"
        copy = self.folder / name
        copy.write_text(text)
        copy.chmod(0o755)
        return copy

    # -- observing

    def processes(self) -> list[psutil.Process]:
        pids = self.folder / "redis.pids"
        servers = set(pids.read_text().split()) if pids.exists() else set()

        def is_ours(process: psutil.Process) -> bool:
            ours = _environment(process).get(TOKEN) == self._token
            return ours or (str(process.pid) in servers and _get(process.name, "").startswith(("redis", "valkey")))

        return [process for process in psutil.process_iter() if is_ours(process) and _lives(process)]

    def agents(self) -> list[psutil.Process]:
        """The processes that are `redelastic run`."""
        return [p for p in self.processes() if _is_agent(_command(p))]

    def wait(self, what: str, condition: Callable[[], T], limit: float = LIMIT) -> T:
        deadline = time.monotonic() + limit
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"Not within {limit:g} s: {what}.\n{self.log[-6000:]}")
            time.sleep(POLL)
        return found

    def wait_end(self, process: subprocess.Popen[bytes], limit: float = LIMIT) -> int:
        self.wait("it has ended", lambda: process.poll() is not None, limit)
        return int(process.returncode)

    def control(self) -> RunControl:
        """The control of the agents' run, by the endpoint and the login of an agent."""
        agent = self.wait("there is an agent", self.agents)[0]
        [run_id] = [word.partition("=")[2] for word in agent.cmdline() if word.startswith("--rdzv-id=")]
        ca = [word.partition("ca_cert=")[2] for word in agent.cmdline() if "ca_cert=" in word]
        endpoint = parse_endpoint(agent.environ()[URL_VARIABLE], ca_cert=ca[0] if ca else None)
        return RunControl(Connection.open(endpoint, connect_timeout=LIMIT), RunKeys(run_id))

    def assert_no_password_is_seen(self) -> None:
        """Neither a command line of the site's processes nor the log contains the agents' password."""
        lines = [" ".join(_command(p)) for p in self.processes()]
        passwords = {urlsplit(_environment(p).get(URL_VARIABLE, "")).password for p in self.agents()} - {None}
        assert passwords
        assert all(len(password) > 10 for password in map(str, passwords))
        for password in map(str, passwords):
            for form in (password, unquote(password)):
                assert not [line for line in lines if form in line]
                assert form not in self.log


def _get(ask: Callable[[], T], otherwise: T) -> T:
    try:
        return ask()
    except psutil.Error:
        return otherwise


def _environment(process: psutil.Process) -> dict[str, str]:
    return _get(process.environ, dict[str, str]())


def _command(process: psutil.Process) -> list[str]:
    return _get(process.cmdline, list[str]())


def _lives(process: psutil.Process) -> bool:
    return _get(process.status, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE


def _is_agent(words: list[str]) -> bool:
    """Whether this is Python with `redelastic run`, not a shell or srun that starts it."""
    return len(words) > 2 and words[1].endswith("/redelastic") and words[2] == "run"


def kill_node(agent: psutil.Process) -> None:
    """Kill an agent and its workers at once, as if their host died."""
    for process in [agent, *agent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def port_of_a_slurm_job() -> Iterator[int]:
    """A free port among those that `slurm.sbatch` derives from a job's number."""
    with contextlib.ExitStack() as opened:
        for port in range(20000 + os.getpid() % 9000, 30000):
            try:
                reservation, _ = reserve_port(port)
            except OSError:
                continue
            opened.enter_context(reservation)
            break
        yield port


# -- a kubelet


class Pod:
    """A pod of one container, whose commands run here as a kubelet would run them.

    Args:
        site: where it runs.
        spec: its spec.
        labels: its labels.
        secrets: the cluster's secrets, by name and key.
        instead: replacements for names, ports and paths that each pod has for itself, but that are shared here.
    """

    def __init__(
        self,
        site: Site,
        spec: Mapping[str, Any],
        *,
        labels: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]],
        instead: Mapping[str, str],
    ) -> None:
        self.site, self.spec, self._instead = site, spec, instead
        [self.container] = spec["containers"]
        self.environment: dict[str, str] = {}
        for variable in self.container.get("env", []):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                value = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            elif "fieldRef" in source:
                value = labels[source["fieldRef"]["fieldPath"].removeprefix("metadata.labels['").removesuffix("']")]
            else:
                value = self._own(variable["value"])
            self.environment[variable["name"]] = value

    def start(self, *, script: list[str] | None = None, **more: str) -> None:
        """Start the container, with another training script if one is given, and ``more`` environment variables."""
        words = [*self.container.get("command", []), *self.container.get("args", [])]
        words = [self._own(word) for word in words]
        words = words if script is None else [*words[: words.index("-m")], *script]
        self.process = self.site.start(*words, **self.environment, **more)

    def _own(self, text: str) -> str:
        """A text of the spec with its variables and its replacements."""
        for name, value in self.environment.items():
            text = text.replace(f"$({name})", value)
        for word, own in self._instead.items():
            text = text.replace(word, own)
        return text

    def probe(self, name: str) -> bool:
        """Send the container's readinessProbe, or another one by its name; returns whether it succeeds."""
        request = self.container[name]["httpGet"]
        [port] = [p["containerPort"] for p in self.container["ports"] if p["name"] == request["port"]]
        url = f"http://127.0.0.1:{self._own(str(port))}{request['path']}"
        direct = build_opener(ProxyHandler({}))
        try:
            with direct.open(url, timeout=self.container[name].get("timeoutSeconds", 1)):
                return True
        except OSError:
            return False

    def pre_stop(self) -> None:
        """Run the container's preStop hook."""
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        assert self.site.start(*map(self._own, command), **self.environment).wait(LIMIT) == 0

    def delete(self) -> int:
        """End the pod as a kubelet does: preStop, SIGTERM, SIGKILL after the grace period; returns the exit code."""
        self.pre_stop()
        self.process.terminate()
        try:
            return self.process.wait(min(LIMIT, self.spec["terminationGracePeriodSeconds"]))
        except subprocess.TimeoutExpired:
            kill_node(psutil.Process(self.process.pid))
            return self.process.wait(LIMIT)


def job_action(spec: Mapping[str, Any], code: int) -> str:
    """The action of a Job's podFailurePolicy for a container's exit code."""
    for rule in spec["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return str(rule["action"])
    return "Count"


def members(control: RunControl, count: int, *, steps: bool = True) -> list[Node]:
    """The members of a round of so many nodes, by rank, once all have made steps in it (`workers/aware.py`)."""
    try:
        state = control.state()
    except UnknownRunError:
        return []
    found = sorted((node for node in state.nodes if node.standing == "member"), key=lambda node: node.rank or 0)
    at_work = all(node.status.get("state") == "running" and (not steps or node.step) for node in found)
    return found if len(found) == state.size == count and at_work else []


def record(folder: Path, event: str) -> list[dict[str, Any]]:
    """What the workers of `workers/aware.py` did."""
    whole, _, _ = (folder / "record.jsonl").read_text().rpartition("\n")  # the last line may be half-written
    return [line for line in map(json.loads, whole.splitlines()) if line["event"] == event]
