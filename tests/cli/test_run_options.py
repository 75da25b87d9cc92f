"""The options of `redelastic run`: our flags are spelled, and set by a launcher's variables, like torchrun's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redelastic.agent import launch as launch_module
from redelastic.cli import main

SCRIPT = str(Path(__file__))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed to :func:`launch`, which does nothing."""
    calls: list[Any] = []

    def launch(config: object, options: object, *_: object, **more: object) -> int:
        calls.extend((config, options, more))
        return 0

    monkeypatch.setattr(launch_module, "launch", launch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return calls


PLACE = ("--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x")


@pytest.mark.parametrize(
    "given",
    [
        ("--drain-timeout=7", "--max-job-restarts=3", "--share-gpus", "--health-check=network", "--health-timeout=9"),
        ("--drain_timeout=7", "--max_job_restarts=3", "--share_gpus", "--health_check=network", "--health_timeout=9"),
        {
            "PET_DRAIN_TIMEOUT": "7",
            "PET_MAX_JOB_RESTARTS": "3",
            "PET_SHARE_GPUS": "1",
            "PET_HEALTH_CHECK": "network",
            "PET_HEALTH_TIMEOUT": "9",
        },
    ],
    ids=["hyphens", "underscores", "variables"],
)
def test_our_flags_are_written_as_torchruns(
    given: tuple[str, ...] | dict[str, str], launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: tuple[str, ...] = ()
    if isinstance(given, dict):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
    else:
        flags = given
    assert main(["run", *PLACE, *flags, SCRIPT]) == 0
    config, options, _ = launched
    assert (options.drain_timeout, options.max_job_restarts, options.share_gpus) == (7, 3, True)
    assert (options.health_checks, options.health_timeout) == (("network",), 9)
    assert config.max_restarts == 3


def test_a_flag_outweighs_its_variable(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_DRAIN_TIMEOUT", "7")
    assert main(["run", *PLACE, "--drain-timeout=8", SCRIPT]) == 0
    assert launched[1].drain_timeout == 8


def test_a_launcher_may_place_the_run_by_variables_alone(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow's trainer sets such variables, those of the static rendezvous among them."""
    told = {"RDZV_BACKEND": "redis", "RDZV_ENDPOINT": "127.0.0.1:1", "RDZV_ID": "x", "NNODES": "2:4"}
    told |= {"NPROC_PER_NODE": "3", "NODE_RANK": "1", "MASTER_ADDR": "train-0", "MASTER_PORT": "29400"}
    for name, value in told.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert main(["run", SCRIPT]) == 0
    config = launched[0]
    assert config.nproc_per_node == 3
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("redis", "127.0.0.1:1", "x")
    assert (config.min_nodes, config.max_nodes) == (2, 4)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("PET_RDZV_BACKEND", "c10d", "PET_RDZV_BACKEND=c10d selects another rendezvous: unset it"),
        ("PET_DRAIN_TIMEOUT", "-1", "drain_timeout=-1"),
    ],
)
@pytest.mark.usefixtures("launched")
def test_a_wrong_variable_is_told(
    variable: str, value: str, told: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["run", *PLACE, SCRIPT]) == 2
    assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--nproc-per-node=0",), "--nproc-per-node=0 is out of range: it must be 1 or more"),
        (("--nproc-per-node=-3",), "--nproc-per-node=-3 is out of range"),
        (("--standalone", "--nnodes=2"), "--nnodes=2 needs several hosts, and --standalone has one"),
    ],
)
@pytest.mark.usefixtures("launched")
def test_what_cannot_run_is_refused(given: tuple[str, ...], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *PLACE, *given, SCRIPT]) == 2
    assert told in capfd.readouterr().err


def test_the_shutdown_timeout_is_known_on_every_torch(launched: list[Any]) -> None:
    assert main(["run", *PLACE, "--shutdown-timeout=2", SCRIPT]) == 0
    assert launched[2] == {"shutdown_timeout": 2, "exit_barrier_timeout": None}
    with pytest.raises(SystemExit, match="2"):
        main(["run", *PLACE, "--shutdown-timeout=x", SCRIPT])


@pytest.mark.parametrize(
    ("given", "restarts"),
    [
        ((), 0),
        (("--max-job-restarts=2",), 2),
        (("--max-restarts=0", "--max-job-restarts=2"), 0),
        (("--max-restarts=3",), 3),
    ],
)
def test_the_restarts_of_a_node_are_those_of_the_job_unless_given(
    launched: list[Any], given: tuple[str, ...], restarts: int
) -> None:
    assert main(["run", *PLACE, *given, SCRIPT]) == 0
    assert launched[0].max_restarts == restarts


def test_an_empty_drain_file_is_none(launched: list[Any]) -> None:
    assert main(["run", *PLACE, "--drain-file=", SCRIPT]) == 0
    assert launched[1].drain_file is None
