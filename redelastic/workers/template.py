"""Template: a process that has imported what workers need, and the workers forked from it.

``site/sitecustomize.py`` is the template's program, and says how a fork becomes a worker. A forked worker differs from
a new process only in this:

- What the preloaded modules do at import is done once: what they print, what they read from the environment, what they
  draw at random (except for ``random`` and NumPy's generator, which are reseeded). Variables that they set are set in
  each worker, unless its agent gives it another value.
- Forks of one template share a hash seed, unless ``PYTHONHASHSEED`` sets it.
- The garbage collector ignores what was imported, so that it stays in shared memory (``gc.unfreeze()`` undoes that).
- ``/proc/PID/environ`` shows the template's environment, without the variables of the round; ``os.environ`` is right.
- ``ps`` shows the template's command line, which is the last worker's; ``sys.argv`` and ``sys.orig_argv`` are right.
- Umask, limits, priority and cores are the agent's as of the template's start.
- It takes longer to end by itself: an interpreter that tears down its modules writes to all their pages.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from redelastic.workers.deaths import signal_name

from .site.sitecustomize import ADOPTED, RUN, VARIABLE, receive, send

SITE: Final = str(Path(__file__).parent / "site")
FORK_TIMEOUT: Final = 10.0  # for a template to fork a worker, in seconds
CHANGES_TIMEOUT: Final = 0.05  # to look for files that have changed, in seconds
POLL_INTERVAL: Final = 0.1  # between checks whether to keep waiting, in seconds
KILL_TIMEOUT: Final = 5.0  # for a template that was killed to be gone, in seconds
LOST_STATUS: Final = 255  # exit status of a worker that another waiter has reaped


class TemplateError(Exception):
    """A template is unusable, or has failed; the text says why."""


class Fork:
    """A worker that was forked from a template: what torch needs of a ``subprocess.Popen``.

    Attributes:
        pid: of the worker, a child of this process.
        returncode: its exit status, or minus the signal that ended it; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Ask for its exit status; None while it runs."""
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = LOST_STATUS
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: it did not end within ``timeout`` seconds.
        """
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        pause = 0.0005
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return status


class Template:
    """One template process, from its start to its end.

    Args:
        command: a worker's command line: an interpreter, its options, and a script or ``-m`` and a module.
        modules: what to import.
        environment: of the template.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, command: Sequence[str], modules: Iterable[str], environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._command = list(command)
        self._files: dict[str, tuple[int, int]] | None = None  # None: not ready yet
        self._began = time.monotonic()
        self._socket, template_end = socket.socketpair()
        path = os.pathsep.join(filter(None, (SITE, environment.get("PYTHONPATH"))))
        request = f"{template_end.fileno()}:{','.join(modules)}"
        with template_end:
            self._process = subprocess.Popen(
                self._command,
                env={**environment, "PYTHONPATH": path, VARIABLE: request},
                pass_fds=[template_end.fileno()],
                start_new_session=True,
            )
        self._socket.settimeout(FORK_TIMEOUT)

    @property
    def pid(self) -> int:
        """Pid of the template."""
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether it is known to have imported everything."""
        return self._files is not None

    def await_ready(self, timeout: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait until it has imported everything.

        Args:
            timeout: in seconds, from its start.
            is_hurried: whether to give up now; called several times a second.

        Raises:
            TemplateError: it cannot.
            TimeoutError: it has not done so in time.
        """
        if self._files is not None:
            return
        until = self._began + timeout
        while not select.select([self._socket], [], [], min(POLL_INTERVAL, max(0.0, until - time.monotonic())))[0]:
            if not self.lives():  # a process that it has started may keep the connection open
                raise TemplateError(f"the template {self.describe_end()} during its imports")
            if time.monotonic() >= until:
                raise TimeoutError(f"the template did not finish its imports within {timeout:g} s")
            if is_hurried():
                raise TimeoutError("this node is about to leave, and the template has not finished its imports")
        try:
            (problem, files), _ = receive(self._socket)
        except (OSError, EOFError) as e:
            raise TemplateError(f"the template {self.describe_end()} during its imports") from e
        if problem:
            raise TemplateError(problem)
        self._files = files

    def lives(self) -> bool:
        """Whether the process is alive."""
        return self._process.poll() is None

    def await_end(self, timeout: float) -> None:
        """Wait for its end without polling; where the kernel has no pidfd, return at once.

        Args:
            timeout: in seconds.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except (OSError, AttributeError):  # it has ended; or Linux before 5.3
            return
        try:
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            ended.poll(1000 * timeout)
        finally:
            os.close(handle)

    def changed(self) -> str:
        """A file that has changed since it was imported, or an empty string.

        Files outside the installation come first: checking all could take long on a network disk.
        """
        files, until = self._files or {}, time.monotonic() + CHANGES_TIMEOUT
        for path in sorted(files, key=lambda path: path.startswith((sys.prefix, sys.base_prefix))):
            try:
                found = os.stat(path)  # noqa: PTH116  # faster
            except OSError:
                return path
            if (found.st_mtime_ns, found.st_size) != files[path]:
                return path
            if time.monotonic() > until:
                break
        return ""

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None
    ) -> Fork:
        """Start a worker.

        Args:
            command: its command line, which differs from the template's in the script's arguments only.
            environment: of the worker.
            stdout: where its standard output goes; None: where the agent's goes.
            stderr: where its standard error goes; None: where the agent's goes.

        Raises:
            TemplateError: the template has failed; no worker runs.
        """
        streams = {number: file.fileno() for number, file in ((1, stdout), (2, stderr)) if file is not None}
        connection, worker_end = socket.socketpair()
        with connection:
            connection.settimeout(FORK_TIMEOUT)
            try:
                with worker_end:
                    handled = [int(s) for s in signal.valid_signals() if callable(signal.getsignal(s))]
                    request = [*command], dict(environment), [*streams], handled
                    send(self._socket, request, [worker_end.fileno(), *streams.values()])
                pid = int.from_bytes(connection.recv(8), "big")
                adopted = self._socket.recv(1) == ADOPTED
                if pid and adopted:
                    connection.sendall(RUN)
                    return Fork(pid)
            except OSError as e:
                raise TemplateError(f"it does not answer ({e})") from e
        raise TemplateError(f"it {self.describe_end()}")

    def describe_end(self) -> str:
        """Describe how it has ended."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "does not fork"
        return f"was ended by {signal_name(-status)}" if status < 0 else f"ended with status {status}"

    def close(self) -> None:
        """End the template; its workers are not touched; idempotent.

        It may live on if the kernel does not let go of it, for example while it reads from an unreachable disk.
        """
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT)
