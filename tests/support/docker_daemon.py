"""A private Docker daemon for a test, in its own network, mount and process namespaces.

Its bridges, firewall rules and mounts are not the host's, and its images are in memory. All of them end with the
daemon's process, which ends with its parent, even by SIGKILL. A folder with its log and its socket, and the cgroups of
its containers, are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import psutil

from redelastic.redis import server as server_module
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

LIMIT: Final = 240.0  # for one docker call, in seconds: an image with torch is large
_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMORY: Final = 6e9  # for the image with torch, and nodes that have imported it, in bytes
_NEEDED: Final = {  # program: Debian package
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "unshare": "util-linux",
    "ip": "iproute2",
}


class DockerError(RuntimeError):
    """A docker call failed; the message has its output."""


def missing() -> str:
    """Why no daemon can run here, in one line; "" if one can."""
    if os.geteuid() != 0:
        return "a Docker daemon needs root"
    if (free := psutil.virtual_memory().available) < _MEMORY:
        return f"of memory {free / 1e9:.1f} GB are free, {_MEMORY / 1e9:.0f} GB are needed"
    packages = sorted({package for program, package in _NEEDED.items() if shutil.which(program) is None})
    return f"not installed: the Debian packages {', '.join(packages)}" if packages else ""


class DockerDaemon:
    """The daemon, for one block, and docker commands that use it.

    Raises:
        DockerError: it does not start here; the message ends with its log.
    """

    def __init__(self) -> None:
        self.name = f"redelastic-{uuid.uuid4().hex[:8]}"
        self._stack = contextlib.ExitStack()
        self.folder = Path()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="redelastic-docker-"))
            stack.callback(shutil.rmtree, self.folder)
            stack.callback(self._remove_cgroups)
            log, data = self.folder / "log", self.folder / "data"
            data.mkdir()
            # What is killed is unshare. The kernel then kills its child, the first process of the pid namespace, and
            # with it all others there.
            process = server_module._OwnedProcess(
                [
                    *(str(shutil.which("unshare")), "--mount", "--net", "--pid", "--fork", "--kill-child"),
                    *(
                        "--mount-proc",
                        "sh",
                        "-c",
                        'mount -t tmpfs images "$0" && ip link set lo up && exec "$@"',
                        str(data),
                    ),
                    *("dockerd", f"--host={self._host}", f"--data-root={data}", f"--exec-root={data}/exec"),
                    *(f"--pidfile={self.folder}/pid", "--storage-driver=overlay2"),
                    *(f"--cgroup-parent=/{self.name}", "--exec-opt=native.cgroupdriver=cgroupfs"),
                    "--default-address-pool=base=10.0.0.0/8,size=24",  # avoids the host's networks
                ],
                "",
                log,
            )
            stack.callback(self._end, process)
            try:
                wait_until(lambda: process.running_pid is None or self._answers(), "dockerd answers", 60)
                assert process.running_pid is not None, "dockerd ended"
            except (AssertionError, TimeoutError) as e:
                raise DockerError(f"{e}: {log.read_text(errors='replace')[-1500:]}") from None
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def _host(self) -> str:
        return f"unix://{self.folder}/socket"

    def _answers(self) -> bool:
        return self._run(["docker", "version"], {}).returncode == 0

    def _end(self, process: server_module._OwnedProcess) -> None:
        inside = [p for pid in [process.running_pid] if pid for p in psutil.Process(pid).children()]
        process.kill()
        _, alive = psutil.wait_procs(inside, timeout=30)
        assert not alive, f"dockerd is still there: {alive}"

    def _remove_cgroups(self) -> None:
        """Remove the containers' cgroups. For a moment after its processes are killed, a cgroup is still busy."""

        def gone() -> bool:
            for root in self.cgroups():
                for folder, _, _ in os.walk(root, topdown=False):
                    with contextlib.suppress(OSError):
                        Path(folder).rmdir()
            return not self.cgroups()

        wait_until(gone, "the containers' cgroups are removed", 30)

    def cgroups(self) -> list[Path]:
        """The roots of the containers' cgroups that exist, one in each hierarchy."""
        return [path for path in (_CGROUPS / self.name, *_CGROUPS.glob(f"*/{self.name}")) if path.exists()]

    def docker(self, *arguments: str) -> str:
        """Run a docker command; returns its stdout.

        Raises:
            DockerError: it failed.
        """
        return self._checked(["docker", *arguments], {})

    def compose(self, file: Path, *arguments: str, settings: Mapping[str, str]) -> str:
        """Run a command of Compose: version 2 if docker has it, else Debian's; returns its stdout."""
        has_plugin = self._run(["docker", "compose", "version"], {}).returncode == 0
        command = ["docker", "compose"] if has_plugin else ["docker-compose"]
        return self._checked([*command, f"--file={file}", f"--project-name={self.name}", *arguments], settings)

    def import_image(self, name: str, write: Callable[[IO[bytes]], None], *changes: str) -> None:
        """Make an image from the tar archive that ``write`` writes; each change is a line of a Dockerfile."""
        command = ["docker", "import", *(f"--change={change}" for change in changes), "-", name]
        with (self.folder / "import").open("w+b") as output:
            process = subprocess.Popen(
                command, env=self._environment({}), stdin=subprocess.PIPE, stdout=output, stderr=output
            )
            assert process.stdin is not None
            try:
                with process.stdin:
                    write(process.stdin)
            except BrokenPipeError:
                pass
            finally:
                if process.wait(LIMIT) != 0:
                    output.seek(0)
                    raise DockerError(f"{' '.join(command)}: {output.read().decode(errors='replace')}")

    def left(self) -> list[str]:
        """The containers, volumes and networks left, except Docker's own networks."""
        found = [self.docker("ps", "--all", "--quiet"), self.docker("volume", "ls", "--quiet")]
        return "".join([*found, self.docker("network", "ls", "--quiet", "--filter=type=custom")]).split()

    def _environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        own = {"DOCKER_HOST": self._host, "BUILDX_CONFIG": str(self.folder / "buildx"), "COMPOSE_HTTP_TIMEOUT": "200"}
        return {**os.environ, **own, **settings}

    def _run(self, command: list[str], settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self._environment(settings),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=LIMIT,
        )

    def _checked(self, command: list[str], settings: Mapping[str, str]) -> str:
        done = self._run(command, settings)
        if done.returncode != 0:
            raise DockerError(
                f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
            )
        return done.stdout
