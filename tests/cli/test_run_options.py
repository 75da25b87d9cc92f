"""The options of `redelastic run`: our flags are spelled, and set by a launcher's variables, like torchrun's."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import shtab
import torch.distributed.run as torchrun

from redelastic.agent import launch as launch_module
from redelastic.cli import main
from redelastic.cli.run_options import make_parser
from redelastic.workers.logs import HIDDEN, command_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    message = {"RDZV_BACKEND": "redis", "RDZV_ENDPOINT": "127.0.0.1:1", "RDZV_ID": "x", "NNODES": "2:4"}
    message |= {"NPROC_PER_NODE": "3", "NODE_RANK": "1", "MASTER_ADDR": "train-0", "MASTER_PORT": "29400"}
    for name, value in message.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert main(["run", SCRIPT]) == 0
    config = launched[0]
    assert config.nproc_per_node == 3
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("redis", "127.0.0.1:1", "x")
    assert (config.min_nodes, config.max_nodes) == (2, 4)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PET_RDZV_BACKEND", "c10d", "PET_RDZV_BACKEND=c10d selects another rendezvous: unset it"),
        ("PET_DRAIN_TIMEOUT", "-1", "drain_timeout=-1"),
    ],
)
@pytest.mark.usefixtures("launched")
def test_a_wrong_variable_is_an_error(
    variable: str, value: str, message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["run", *PLACE, SCRIPT]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--nproc-per-node=0",), "--nproc-per-node=0 is out of range: it must be 1 or more"),
        (("--nproc-per-node=-3",), "--nproc-per-node=-3 is out of range"),
        (("--standalone", "--nnodes=2"), "--nnodes=2 needs several hosts, and --standalone has one"),
    ],
)
@pytest.mark.usefixtures("launched")
def test_what_cannot_run_is_refused(given: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *PLACE, *given, SCRIPT]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "why"), [("file", "File exists"), ("file/logs", "Not a directory"), ("x" * 300, "File name too long")]
)
@pytest.mark.usefixtures("launched")
def test_a_log_dir_that_cannot_be_made_says_why(
    name: str, why: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert main(["run", *PLACE, f"--log-dir={tmp_path}/{name}", SCRIPT]) == 2
    assert f"--log-dir={tmp_path}/{name} cannot be made: {why}. Name one that can" in capfd.readouterr().err


def test_a_log_dir_is_made(launched: list[Any], tmp_path: Path) -> None:
    assert main(["run", *PLACE, f"--log-dir={tmp_path}/new/logs", SCRIPT]) == 0
    assert launched[0].logs_specs.root_log_dir == f"{tmp_path}/new/logs"
    assert (tmp_path / "new" / "logs").is_dir()


def test_the_log_folder_is_shown_as_an_absolute_path(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readers may work in another folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", *PLACE, "--log-dir=logs", SCRIPT]) == 0
    assert launched[0].logs_specs.root_log_dir == f"{tmp_path}/logs"


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("--shutdown-timeout=2", {"shutdown_timeout": 2, "exit_barrier_timeout": None}),
        ("--exit-barrier-timeout=5", {"shutdown_timeout": 30, "exit_barrier_timeout": 5}),
    ],
)
def test_torchs_newest_timeouts_are_known_on_every_torch(
    launched: list[Any], given: str, known: dict[str, float | None]
) -> None:
    assert main(["run", *PLACE, given, SCRIPT]) == 0
    assert launched[2] == {**known, "preflight": None}
    with pytest.raises(SystemExit, match="2"):
        main(["run", *PLACE, f"{given}x", SCRIPT])


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


def test_a_preflight_measures_as_the_options_say(launched: list[Any]) -> None:
    given = ("--preflight", "--exclude", "--preflight-path=/a", "--preflight-path=/b")
    assert main(["run", *PLACE, *given, SCRIPT]) == 0
    preflight = launched[2]["preflight"]
    assert (preflight.folders, preflight.exclude) == (("/a", "/b"), True)
    assert launched[1].exclude
    assert launched[1].failed_rounds_limit == 1_000_000
    assert main(["run", *PLACE, *given, "--max-failed-rounds=3", SCRIPT]) == 0
    assert launched[4].failed_rounds_limit == 3


def test_an_empty_drain_file_is_none(launched: list[Any]) -> None:
    assert main(["run", *PLACE, "--drain-file=", SCRIPT]) == 0
    assert launched[1].drain_file is None


def write(folder: Path, text: str) -> str:
    file = folder / "job.toml"
    file.write_text(text)
    return str(file)


FILE = f"""
rdzv-endpoint = "127.0.0.1:1"
rdzv_id = "night"             # underscores are as good, as on the command line
nnodes = "2:4"
nproc-per-node = 3
drain-timeout = 7
hang-timeout = 0.5
max-job-restarts = 9
health-check = ["network", "disk"]
share-gpus = true
drain-file = "/drain"
duplicate-stdout-filters = ["loss", "step"]
training-script = "{SCRIPT}"
training-script-args = ["--lr", "0.1"]
"""


class TestConfigFile:
    def test_is_as_good_as_flags(self, launched: list[Any], tmp_path: Path) -> None:
        assert main(["run", "--config", write(tmp_path, FILE)]) == 0
        from_file = launched[:]
        launched.clear()
        flags = ["--nnodes=2:4", "--nproc-per-node=3", "--drain-timeout=7", "--hang-timeout=0.5", "--rdzv-id=night"]
        flags += ["--max-job-restarts=9", "--health-check=network", "--health-check=disk", "--share-gpus"]
        flags += ["--drain-file=/drain", "--duplicate-stdout-filters=loss,step", "--rdzv-endpoint=127.0.0.1:1"]
        assert main(["run", *flags, SCRIPT, "--lr", "0.1"]) == 0
        assert from_file[1:] == launched[1:]
        for name in ("min_nodes", "max_nodes", "nproc_per_node", "rdzv_endpoint", "run_id", "max_restarts"):
            assert getattr(from_file[0], name) == getattr(launched[0], name), name
        assert from_file[0].duplicate_stdout_filters == launched[0].duplicate_stdout_filters == ["loss", "step"]

    def test_that_the_reference_shows_is_taken(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        page = (Path(__file__).parents[2] / "docs" / "reference" / "agent.md").read_text()
        [text] = re.findall(r"```toml\n(.+?)```", page, re.DOTALL)
        assert main(["run", "--config", write(tmp_path, text), "--print-config"]) == 0
        printed, shown = tomllib.loads(capfd.readouterr().out), tomllib.loads(text)
        assert printed == printed | shown | {"nproc-per-node": "8"}

    def test_flags_outweigh_variables_and_these_the_file(
        self, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"NNODES": "3", "DRAIN_TIMEOUT": "8", "SHARE_GPUS": "0", "HEALTH_CHECK": "memory"}.items():
            monkeypatch.setenv(f"PET_{name}", value)
        monkeypatch.setenv("PET_CONFIG", write(tmp_path, FILE))
        assert main(["run", "--drain-timeout=9"]) == 0
        config, options, _ = launched
        assert (config.min_nodes, config.nproc_per_node) == (3, 3)
        assert (options.drain_timeout, options.hang_timeout, options.share_gpus) == (9, 0.5, False)
        assert options.health_checks == ("memory",)
        launched.clear()
        assert main(["run", "--health-check=none", "--health-check=gpu"]) == 0
        assert launched[1].health_checks == ("gpu",), "a flag adds nothing to the file's list"

    @pytest.mark.parametrize(("flags", "folders"), [((), ["/a", "/b"]), (("--preflight-path=/c",), ["/c"])])
    def test_folders_for_a_preflight(
        self, capfd: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...], folders: list[str]
    ) -> None:
        file = write(tmp_path, "preflight = true\npreflight-path = ['/a', '/b']")
        assert main(["run", "--config", file, "--print-config", *flags]) == 0
        assert tomllib.loads(capfd.readouterr().out)["preflight-path"] == folders

    def test_a_script_on_the_command_line_comes_with_its_own_arguments(
        self, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["run", "--config", write(tmp_path, FILE), "--print-config", "other.py"]) == 0
        printed = tomllib.loads(capfd.readouterr().out)
        assert printed["training-script"] == "other.py"
        assert "training-script-args" not in printed

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("hang-timout = 3", "job.toml: hang-timout is no option; did you mean hang-timeout? see"),
            ("config = 'x'", "job.toml: config is no option"),
            ("[rdzv-conf]\nttl = 3", 'job.toml: rdzv-conf must be a text, not a table: write rdzv-conf = "…".'),
            ("nnodes = true", "job.toml: nnodes must be a text, not a boolean"),
            ("hang_timeout = '3'", "job.toml: hang_timeout must be a number, not a text: write hang_timeout = 1.5."),
            ("hang-timeout = true", "job.toml: hang-timeout must be a number, not a boolean"),
            ("max-job-restarts = 3.5", "job.toml: max-job-restarts must be a whole number, not a number"),
            (
                "share-gpus = 1",
                "job.toml: share-gpus must be true or false, not a whole number: write share-gpus = true.",
            ),
            ("health-check = 'disk'", "job.toml: health-check must be a list of texts, not a text"),
            ("health-check = [1]", "job.toml: health-check must be a list of texts, not a list"),
            ("drain-file = 2026-01-01", "job.toml: drain-file must be a text, not a date or time"),
            ("admit = 'never'", "job.toml: admit is 'never': it must be one of now, saved, checkpoint."),
            ("hang-timeout = 1\nhang_timeout = 1", "job.toml: hang-timeout is there twice, once with underscores"),
            ("drain-timeout = -1", "drain_timeout=-1"),
            ("nnodes = ", "job.toml', is not TOML: Invalid value (at "),
        ],
    )
    @pytest.mark.usefixtures("launched")
    def test_what_is_wrong_is_said(
        self, text: str, message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["run", *PLACE, f"--config={write(tmp_path, text)}", SCRIPT]) == 2
        said = capfd.readouterr().err
        assert message in said
        assert said.count("\n") == 1

    def test_a_file_that_is_not_there_is_said(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert main(["run", f"--config={tmp_path}/job.toml", SCRIPT]) == 2
        assert "/job.toml', cannot be read: No such file or directory." in capfd.readouterr().err

    @pytest.mark.usefixtures("launched")
    def test_a_script_is_still_needed(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["run", "--config", write(tmp_path, "nnodes = 1")])
        assert "the following arguments are required: training_script" in capfd.readouterr().err


@pytest.mark.parametrize("given", [["--print-completion", "bash"], ["--print_completion=zsh"], ["--print-compl"]])
def test_torchruns_completion_is_refused(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Newer torch has the option; its script would be for the command name `torchrun`."""
    older = torchrun.get_args_parser

    def newer() -> argparse.ArgumentParser:
        parser = older()
        if "--print-completion" not in parser.format_help():
            shtab.add_argument_to(parser, ["--print-completion", "--print_completion"])
        return parser

    monkeypatch.setattr(torchrun, "get_args_parser", newer)
    with pytest.raises(SystemExit, match="2"):
        main(["run", *given])
    message = "redelastic run: --print-completion is for torchrun: use redelastic completion bash (or zsh, or fish).\n"
    assert capfd.readouterr() == ("", message)
    assert "--print-completion" not in make_parser().format_help()
    assert main(["completion", "bash"]) == 0, "the command that is named"
    printed = capfd.readouterr().out
    assert printed.rstrip().endswith("-F _shtab_redelastic redelastic")
    assert "--print-completion" not in printed
    assert "--print-config" in printed


class TestPrintedConfig:
    def test_can_be_given_back(self, capfd: pytest.CaptureFixture[str], launched: list[Any], tmp_path: Path) -> None:
        args = ["--text", 'a "quoted" \\ backslash, a\ttab, \x7f, é, 😀']
        flags = ["--nnodes=2", "--hang-timeout=2.5", "--survive", "--health-check=a", "--health-check=b"]
        line = ["run", *PLACE, *flags, "--drain-file=/drain", "--duplicate-stderr-filters=a,,b", SCRIPT, *args]
        assert main([*line[:1], "--print-config", *line[1:]]) == 0
        assert launched == [], "nothing runs"
        printed = capfd.readouterr().out
        assert tomllib.loads(printed)["training-script-args"] == args
        assert main(["run", "--config", write(tmp_path, printed), "--print-config"]) == 0
        assert capfd.readouterr().out == printed
        for again in (["run", "--config", str(tmp_path / "job.toml")], line):
            assert main(again) == 0
        assert launched[1:3] == launched[4:6]
        assert launched[0].duplicate_stderr_filters == launched[3].duplicate_stderr_filters == ["a,b"]

    def test_tells_defaults_and_variables_without_a_script(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PET_DRAIN_TIMEOUT", "8")
        assert main(["run", "--print-config", "--max-job-restarts=4"]) == 0
        printed = tomllib.loads(capfd.readouterr().out)
        assert (printed["drain-timeout"], printed["health-check"], printed["share-gpus"]) == (8.0, ["disk"], False)
        assert (printed["max-job-restarts"], printed["max-restarts"]) == (4, 4)
        assert printed.keys().isdisjoint({"rdzv-id", "master-addr", "training-script", "config", "help"})

    def test_has_no_secret(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "c4n4ry-of-wandb")
        url = "rediss://user:c4n4ry-of-redis@127.0.0.1:1/2"
        args = ["--key=c4n4ry-of-wandb", "--store=http://me:c4n4ry-of-http@host", "--api-key=c4n4ry-of-arguments"]
        assert main(["run", "--print-config", f"--rdzv-endpoint={url}", "--rdzv-id=x", SCRIPT, *args]) == 0
        printed = capfd.readouterr().out
        assert "c4n4ry" not in printed
        assert '# rdzv-endpoint = "rediss://127.0.0.1:1/2"  # its login belongs in REDELASTIC_REDIS_URL\n' in printed
        assert {"rdzv-endpoint", "training-script-args"}.isdisjoint(tomllib.loads(printed))

    def test_hides_the_arguments_that_an_event_hides(self, capfd: pytest.CaptureFixture[str]) -> None:
        """By the names of their flags, where nothing else tells that a word is a secret."""
        args = ["--password", "c4n4ry", "--auth-token", "c4n4ry", "--wandb-key=c4n4ry", "--lr", "0.1"]
        assert main(["run", "--print-config", *PLACE, SCRIPT, *args]) == 0
        [line] = [line for line in capfd.readouterr().out.splitlines() if "training-script-args" in line]
        shown = ["--password", HIDDEN, "--auth-token", HIDDEN, f"--wandb-key={HIDDEN}", "--lr", "0.1"]
        assert line == f"# training-script-args = {json.dumps(shown)}  # it has a secret"
        assert " ".join(shown) == command_line(args, {})

    def test_wrong_options_are_errors(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["run", "--print-config", "--nnodes=0", SCRIPT]) == 2
        assert main(["run", "--print-config", "--rdzv-endpoint=redis://user:c4n4ry@h:x", SCRIPT]) == 2
        said = capfd.readouterr()
        assert said.out == ""
        assert "c4n4ry" not in said.err
