"""The recipes for other schedulers, and the frameworks' command lines: what can be checked without these programs."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest

from redelastic.agent import launch
from tests.support.commands import run_command
from tests.support.examples_site import EXAMPLES, job_action

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOW_TO: Final = EXAMPLES.parent / "docs" / "how-to"
# What Kubeflow's runtimes with a policy `torch` set.
OPERATORS: Final = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}


def documents(name: str) -> dict[str, Any]:
    """The objects of a recipe by kind."""
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return {one.get("kind", "Task"): one for one in yaml.safe_load_all((EXAMPLES / name).read_text())}


def accepted(words: list[str]) -> dict[str, Any]:
    """The options that hold for a command line, once `redelastic run` has checked them."""
    assert words[:2] == ["redelastic", "run"]
    done = run_command("run", "--print-config", *words[2:])
    assert done.code == 0, done.err
    options: dict[str, Any] = tomllib.loads(done.out)
    return options


def job_and_command(name: str) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """The Job in a recipe, its command, and the recipe's objects."""
    found = documents(name)
    if "TrainJob" in found:
        runtime = found["TrainingRuntime"]["spec"]
        [replicated] = runtime["template"]["spec"]["replicatedJobs"]
        return replicated["template"]["spec"], found["TrainJob"]["spec"]["trainer"]["command"], found
    [replicated] = found["JobSet"]["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return job, job["template"]["spec"]["containers"][0]["command"], found


@pytest.mark.parametrize("name", ["kubeflow.yaml", "jobset.yaml"])
@pytest.mark.parametrize("variables", [{}, OPERATORS], ids=["", "PET"])
def test_the_command_of_pods_is_accepted(name: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    job, words, found = job_and_command(name)
    options = accepted(words)
    assert (options["nnodes"], options["nproc-per-node"]) == ("1:2", "1")
    nodes = found["TrainJob"]["spec"]["trainer"]["numNodes"] if "TrainJob" in found else job["parallelism"]
    assert nodes == int(options["nnodes"].split(":")[1]) + 1, "a spare"
    grace = job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > options["drain-timeout"] + options.get("shutdown-timeout", 30)


@pytest.mark.parametrize("name", ["kubeflow.yaml", "jobset.yaml"])
def test_pods_are_those_of_kubernetes_yaml(name: str) -> None:
    """The same failure policy, secret, Redis, volumes and run id: the other objects come from there."""
    theirs = documents("kubernetes.yaml")["Job"]["spec"]
    job, words, found = job_and_command(name)
    for field in ("completionMode", "successPolicy", "backoffLimit", "podFailurePolicy"):
        assert job[field] == theirs[field], field
    assert job["template"]["metadata"] == theirs["template"]["metadata"], "the NetworkPolicy's label"
    pod, model = job["template"]["spec"], theirs["template"]["spec"]
    for field in ("restartPolicy", "terminationGracePeriodSeconds", "volumes"):
        assert pod[field] == model[field], field
    [node], [other] = pod["containers"], model["containers"]
    for field in ("image", "env", "volumeMounts"):
        assert node[field] == other[field], field
    assert set(words) <= set(other["command"])
    actions = {code: job_action(job, code) for code in (launch.DRAINED, launch.UNUSED, launch.STOPPED, 1)}
    assert actions == {
        launch.DRAINED: "Ignore",
        launch.UNUSED: "Ignore",
        launch.STOPPED: "FailJob",
        launch.FAILED: "Count",
    }
    assert job_action(job, launch.NO_PROGRESS) == "FailJob"
    if "TrainJob" in found:
        runtime = found["TrainingRuntime"]
        assert "torch" not in runtime["spec"]["mlPolicy"], "Trainer would set variables PET_…"
        assert runtime["spec"]["mlPolicy"]["numNodes"] == found["TrainJob"]["spec"]["trainer"]["numNodes"]
        assert found["TrainJob"]["spec"]["runtimeRef"] == {
            "kind": runtime["kind"],
            "name": runtime["metadata"]["name"],
        }
    else:
        assert job["parallelism"] == job["completions"]
        [rule] = found["JobSet"]["spec"]["failurePolicy"]["rules"]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def run_by_shell(
    folder: Path, command: list[str], variables: Mapping[str, str], code: int, status: str = ""
) -> tuple[list[str], int]:
    """Run a recipe's shell script, where `redelastic run` ends with ``code``.

    Returns:
        The words of `redelastic run`, and the script's exit code.
    """
    said, stand_in = folder / "said", folder / "redelastic"
    stand_in.write_text(
        f"#!/bin/sh\n[ $1 = status ] && echo {shlex.quote(status)} && exit\n"
        f'printf "%s\\n" redelastic "$@" >{shlex.quote(str(said))}\nexit {code}\n'
    )
    stand_in.chmod(0o755)
    environment = {**variables, "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, check=False, timeout=20, env=environment)
    return said.read_text().splitlines(), done.returncode


# What the operator of PyTorchJobs sets in a pod's containers where the job has neither a Master nor an elasticPolicy.
PYTORCHJOB: Final = {"PYTHONUNBUFFERED": "1", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "auto"}


@pytest.mark.parametrize(
    ("code", "status", "action"),
    [
        (0, "", "Succeeded"),
        (launch.UNUSED, "", "Succeeded"),
        *((code, "", "Replaced") for code in (launch.DRAINED, launch.REFUSED, 3, 128 + 9)),
        *((code, "", "JobFailed") for code in (launch.STOPPED, launch.NO_PROGRESS, 2, 127)),
        *((launch.FAILED, status, "Succeeded") for status in ("closed finished", "closed asked")),
        *((launch.FAILED, status, "Replaced") for status in ("regrouping", "dead", "")),
        *((launch.FAILED, status, "JobFailed") for status in ("closed failed", "stopped failed", "stopped asked")),
    ],
)
def test_exit_codes_in_a_pytorchjob(
    tmp_path: Path, code: int, status: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `restartPolicy: ExitCode` the operator replaces pods that end with 128 or more; others fail the job."""
    worker = documents("pytorchjob.yaml")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["restartPolicy"] == "ExitCode"
    [node] = worker["template"]["spec"]["containers"]
    phase, _, cause = status.partition(" ")
    document = json.dumps({"phase": phase, "closed": {"cause": cause} if cause else None}) if status else ""
    words, ends = run_by_shell(tmp_path, [*node["command"], *node["args"]], {"RUN": "train-x7k2p"}, code, document)
    assert action == ("Succeeded" if ends == 0 else "Replaced" if ends >= 128 else "JobFailed")
    if action == "JobFailed":
        assert ends == code, "the pod's status has the agent's own code"
    for variable, value in PYTORCHJOB.items():
        monkeypatch.setenv(variable, value)
    options = accepted(words)
    assert (options["nnodes"], options["nproc-per-node"], options["rdzv-id"]) == ("1:2", "1", "train-x7k2p")
    assert worker["replicas"] == int(options["nnodes"].split(":")[1]) + 1, "a spare"
    grace = worker["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > options["drain-timeout"] + options.get("shutdown-timeout", 30)
    pre_stop = node["lifecycle"]["preStop"]["exec"]["command"]
    assert pre_stop == ["touch", options["drain-file"]], "the shell gets the SIGTERM"


def test_pods_of_a_pytorchjob_are_those_of_kubernetes_yaml() -> None:
    theirs = documents("kubernetes.yaml")["Job"]["spec"]["template"]
    job = documents("pytorchjob.yaml")["PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert set(job["spec"]) == {"runPolicy", "pytorchReplicaSpecs"}, "no elasticPolicy: it sets PET_RDZV_BACKEND"
    [(kind, worker)] = job["spec"]["pytorchReplicaSpecs"].items()
    assert kind == "Worker", "where a Master ends, the job ends"
    assert set(worker) == {"replicas", "restartPolicy", "template"}
    assert worker["template"]["metadata"] == theirs["metadata"], "the NetworkPolicy's label"
    pod, model = worker["template"]["spec"], theirs["spec"]
    assert "restartPolicy" not in pod, "the operator sets it"
    for field in ("automountServiceAccountToken", "terminationGracePeriodSeconds", "volumes"):
        assert pod[field] == model[field], field
    [node], [other] = pod["containers"], model["containers"]
    assert node["name"] == "pytorch", "the operator's webhook demands it"
    for field in ("image", "volumeMounts", "lifecycle"):
        assert node[field] == other[field], field
    run, *env = node["env"]
    assert env == other["env"][1:]
    label = "metadata.labels['training.kubeflow.org/job-name']"
    assert run == {"name": "RUN", "valueFrom": {"fieldRef": {"fieldPath": label}}}
    assert "generateName" in job["metadata"], "that name is the run id"
    [script] = node["args"]
    assert script.startswith("redelastic run ")
    assert set(shlex.split(script.partition("code=$?")[0])) >= set(other["command"][-3:])


@pytest.mark.long
def test_pytorchjob_knows_every_field() -> None:
    """Its pods, as a Pod of the API's own schemas; the rest is in the sets of fields above."""
    validate: Any = importlib.import_module("kubernetes_validate")
    template = documents("pytorchjob.yaml")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    for version in ("1.31", "1.33"):
        validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, version, strict=True)


@pytest.mark.parametrize(
    ("code", "ends"),
    [(0, 0), (launch.UNUSED, 0), (launch.DRAINED, 75), (launch.STOPPED, 76), (launch.NO_PROGRESS, 78), (1, 1)],
)
def test_skypilot(tmp_path: Path, code: int, ends: int) -> None:
    task = documents("skypilot.yaml")["Task"]
    variables = {"SKYPILOT_TASK_ID": "sky-managed-2026-11-27-15-00-00-123456_train_7-0", "SKYPILOT_NUM_NODES": "2"}
    words, ended = run_by_shell(tmp_path, ["bash", "-c", task["run"]], variables, code)
    assert ended == ends
    recovered = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert recovered == [launch.DRAINED]
    assert task["secrets"] == {"REDELASTIC_REDIS_URL": None}
    options = accepted(words)
    assert options["nnodes"] == f"1:{task['num_nodes']}"
    assert options["rdzv-id"] == variables["SKYPILOT_TASK_ID"]
    assert options["drain-timeout"] + options["shutdown-timeout"] < 30, "SkyPilot's own limit"


def test_torchx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The component, with a stand-in for torchx."""
    specs: Any = ModuleType("torchx.specs")
    specs.AppDef = specs.Role = specs.Resource = SimpleNamespace
    specs.RetryPolicy = SimpleNamespace(REPLICA="REPLICA")
    specs.macros = SimpleNamespace(app_id="elastic-j6ccz49fg4nts")
    torchx: Any = ModuleType("torchx")
    torchx.specs = specs
    monkeypatch.setitem(sys.modules, "torchx", torchx)
    monkeypatch.setitem(sys.modules, "torchx.specs", specs)
    elastic = runpy.run_path(str(EXAMPLES / "torchx_elastic.py"))["elastic"]

    app = elastic("--epochs", "3", script="train.py", nodes=4, min_nodes=2, nproc_per_node=8)
    [role] = app.roles
    options = accepted([role.entrypoint, *role.args])
    assert (options["nnodes"], options["nproc-per-node"], options["rdzv-id"]) == ("2:4", "8", specs.macros.app_id)
    assert (role.num_replicas, role.min_replicas, role.env) == (4, 2, {})
    assert options["training-script-args"] == ["--epochs", "3"]
    assert options["drain-timeout"] + options["shutdown-timeout"] < 30, "the default of Kubernetes"
    [role] = elastic(script="train.py", redis="redis://a:1").roles
    assert role.env == {"REDELASTIC_REDIS_URL": "redis://a:1"}


@pytest.mark.parametrize("page", ["schedulers.md", "frameworks.md"])
def test_the_commands_of_pages_are_accepted(page: str) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", (HOW_TO / page).read_text(), re.MULTILINE | re.DOTALL)
    commands = [block.replace("\\\n", " ") for block in blocks if block.startswith("redelastic run")]
    assert len(commands) == (3 if page == "frameworks.md" else 0)
    for line in commands:
        options = accepted(shlex.split(line))
        assert options["rdzv-id"] == "my-job-1"
        assert options["training-script-args"], "what follows the script is the script's"


def test_the_table_of_exit_codes_is_complete() -> None:
    """The page says what each scheduler makes of the agent's own codes."""
    cells = [line.split("|")[1] for line in (HOW_TO / "schedulers.md").read_text().splitlines() if line[:1] == "|"]
    documented = {int(code) for cell in cells for code in re.findall(r"\b\d\d\b", cell)}
    assert documented == {launch.DRAINED, launch.STOPPED, launch.NO_PROGRESS, launch.UNUSED}
