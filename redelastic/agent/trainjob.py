"""Tells Kubeflow Trainer how the job stands, for the status of its TrainJob (KEP-2779)."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, NamedTuple

INTERVAL: Final = 30.0  # between two reports, in seconds; the controller limits them
TIMEOUT: Final = 10.0  # for one report, in seconds
URL: Final = "KUBEFLOW_TRAINER_SERVER_URL"  # the variables that the controller sets in each pod of a TrainJob
CA: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105  # a name


class TrainJob(NamedTuple):
    """The TrainJob of this pod. Contract: Kubeflow Trainer from 2.2 on, with its feature gate ``TrainJobStatus``.

    Attributes:
        url: to which its status is sent.
        ca: file with the certificate of the controller's CA.
        token: file with the pod's token, which Kubernetes renews.
    """

    url: str
    ca: Path
    token: Path

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> TrainJob | None:
        """The TrainJob that the environment names; None if it names none."""
        values = [environ.get(name, "") for name in (URL, CA, TOKEN)]
        return cls(values[0], Path(values[1]), Path(values[2])) if all(values) else None

    def report(self, status: Mapping[str, Any]) -> None:
        """Send what is known of the job.

        Args:
            status: of rank 0's node, as :meth:`redelastic.agent.monitor.NodeMonitor.status` has it.

        Raises:
            OSError: it was not accepted, or a file cannot be read.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
        metrics = [{"name": name, "value": value} for name, value in metrics_of(status).items()]
        request = urllib.request.Request(  # noqa: S310  # the controller's own address
            self.url,
            json.dumps({"trainerStatus": {"metrics": metrics, "lastUpdatedTime": now}}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.token.read_text().strip()}"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=ssl.create_default_context(cafile=self.ca)):  # noqa: S310
            pass


def metrics_of(status: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of a TrainJob, from the status of rank 0's node; unknown ones are left out."""
    steps = [worker["step"] for worker in status.get("workers", ()) if worker.get("step") is not None]
    known = {
        "step": max(steps, default=None),
        "round": status.get("epoch"),
        "nodes": status.get("size"),
        "restarts": status.get("job_restarts"),
        "effectiveTrainingTime": f"{status['ettr']:.4f}" if "ettr" in status else None,
    }
    return {name: str(value) for name, value in known.items() if value is not None}
