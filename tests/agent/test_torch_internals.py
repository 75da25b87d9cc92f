"""The internals of torch that the package uses exist, and a torch without them is reported."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from redelastic import torch_internals
from redelastic.agent.regrouping import RegroupingAgent
from redelastic.torch_internals import Hook, replace_agent_of_launcher, require_torch, shut_down, shutdown_timeout
from tests.support.long_tests import quick_first
from tests.support.waiting import Within

LAUNCHER = "torch.distributed.launcher.api"
until = Within(60)


def test_the_internals_of_torch_that_the_package_uses_exist() -> None:
    """With a new torch this test shows what has changed."""
    assert torch_internals.missing() == []


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (Hook("torch.gone", "x"), "torch.gone.x is missing"),
        (Hook(LAUNCHER, "LocalElasticAgent._gone"), "LocalElasticAgent._gone is missing"),
        (Hook(LAUNCHER, "LaunchConfig", ("min_nodes", "colour")), "LaunchConfig takes no colour"),
    ],
)
def test_missing_internals_are_named(monkeypatch: pytest.MonkeyPatch, hook: Hook, says: str) -> None:
    monkeypatch.setattr(torch_internals, "HOOKS", (hook,))
    [missing] = torch_internals.missing()
    assert missing.endswith(says)


@pytest.mark.parametrize("version", ["2.9.1+cu128", "2.6.0", "1.13.1"])
def test_an_old_torch_is_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError, match=rf"needs torch 2.10 or newer; this is torch {version[:5]}"):
        require_torch(version)
    require_torch("2.10.0")
    require_torch("3.0.0a0+git1234")


@pytest.mark.parametrize(
    "code",
    quick_first(
        [
            "from redelastic import RedisStore",
            "from redelastic.plugin import create; create(None)",
            "from redelastic.cli import main; sys.exit(main(['run', '--standalone', 'x.py']))",
        ]
    ),
    ids=["store", "torchrun", "run"],
)
def test_an_old_torch_is_refused_at_once(code: str) -> None:
    """The refusal comes before any call that could hang."""
    old = "import sys, torch; torch.__version__ = '2.7.1'; "
    done = subprocess.run([sys.executable, "-c", old + code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "redelastic needs torch 2.10 or newer; this is torch 2.7.1" in done.stderr


class OtherAgent(LocalElasticAgent):
    pass


@pytest.mark.parametrize(
    ("found", "warned"), [(LocalElasticAgent, False), (RegroupingAgent, False), (OtherAgent, True), (None, True)]
)
def test_a_launcher_with_another_agent_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: type | None, warned: bool
) -> None:
    launcher = ModuleType(LAUNCHER)
    if found:
        launcher.LocalElasticAgent = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, LAUNCHER, launcher)
    with caplog.at_level(logging.WARNING):
        replace_agent_of_launcher(LocalElasticAgent, RegroupingAgent)
    assert ("cost a restart of --max-restarts" in caplog.text) == warned
    assert getattr(launcher, "LocalElasticAgent", None) is (found if warned else RegroupingAgent)


def test_a_process_without_torchrun_gets_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, LAUNCHER, raising=False)
    replace_agent_of_launcher(LocalElasticAgent, RegroupingAgent)
    assert not caplog.text


class OldConfig:
    """A launch configuration before torch 2.12."""


def test_the_shutdown_timeout_with_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert (shutdown_timeout(OldConfig(), None), shutdown_timeout(OldConfig(), 4)) == (30.0, 4.0)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert (shutdown_timeout(OldConfig(), None), shutdown_timeout(OldConfig(), 4)) == (7.0, 4.0)
    for text, given in (("soon", None), ("nan", None), ("7", -1)):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
        with pytest.raises(ValueError, match="shutdown_timeout must be a number of seconds, 0 or more, not"):
            shutdown_timeout(OldConfig(), given)


def test_shut_down_passes_the_arguments_that_this_torch_takes() -> None:
    calls: list[object] = []
    shut_down(calls.append, signal.SIGTERM, 5.0)
    shut_down(lambda death_sig, timeout: calls.append((death_sig, timeout)), signal.SIGTERM, 5.0)
    assert calls == [signal.SIGTERM, (signal.SIGTERM, 5.0)]


@pytest.mark.parametrize("entrypoint", ["sh", time.sleep], ids=["commands", "functions"])
def test_how_the_processes_of_a_context_ended(entrypoint: Any, tmp_path: Path) -> None:
    envs: dict[int, dict[str, str]] = {0: {}}
    args = {0: ("-c", "exec sleep 600") if entrypoint == "sh" else (600,)}
    context = start_processes("test", entrypoint, args, envs, DefaultLogsSpecs(str(tmp_path)), start_method="fork")
    try:
        assert torch_internals.exit_codes(context) == {}
    finally:
        context.close(signal.SIGKILL)
    assert torch_internals.exit_codes(context) == {0: -signal.SIGKILL}


def ignore_sigterm(started: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started.touch()
    time.sleep(600)


@pytest.mark.parametrize(("within", "given"), [(0.5, ()), (300, (signal.SIGTERM, 0.5))], ids=["usual", "other"])
@pytest.mark.parametrize("entrypoint", ["sh", ignore_sigterm], ids=["commands", "functions"])
def test_a_context_ends_its_processes_within_the_given_timeout(
    entrypoint: Any, within: float, given: tuple[Any, ...], tmp_path: Path
) -> None:
    """torch's own close() after a failure would give them 30 s."""
    envs: dict[int, dict[str, str]] = {0: {}}
    started = tmp_path / "started"
    args = {0: ("-c", f"trap '' TERM; touch {started}; exec sleep 600") if entrypoint == "sh" else (started,)}
    context = start_processes("test", entrypoint, args, envs, DefaultLogsSpecs(str(tmp_path)), start_method="fork")
    ended: list[Any] = []
    torch_internals.close_within(context, within, ended.append)
    until(started.exists, "it ignores SIGTERM")
    began = time.monotonic()
    context.close(*given)
    assert 0.5 <= time.monotonic() - began < 20
    assert ended == [context]
