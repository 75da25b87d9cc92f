"""WarmStart: forks workers from a template where that works; elsewhere they start as usual."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

from torch.distributed.elastic.agent.server.api import WorkerSpec

from redelastic.rendezvous.addresses import INTERFACE_VARIABLES
from redelastic.torch_internals import starting_workers_with, substitute_local_rank

from .processes import ProcessTree
from .template import Fork, Template, TemplateError

log = logging.getLogger(__name__)

END_TIMEOUT: Final = 60.0  # of one wait for a template's end, in seconds
TEMPLATE_TIMEOUT: Final = 30.0  # for a template's imports, in seconds: without it each worker imports the same modules
# What differs between workers or rounds, and is read when a process group is made or a GPU is used. Any other variable
# may have been read by an import: when one changes, a new template is made.
VARYING: Final = re.compile(
    r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    rf"|(TORCHELASTIC|REDELASTIC)_.*|\w+_VISIBLE_DEVICES|{'|'.join(INTERFACE_VARIABLES)}"
)
OPTIONS: Final = re.compile("-[bBOPqsuv]+")  # of Python, which a template can have too


def require_preloadable(spec: WorkerSpec, *, owns_process: bool) -> None:
    """Raise an error if workers cannot be forked from a template.

    Raises:
        ValueError: they cannot; the text says why.
    """
    options: list[str] = []
    for option in () if callable(spec.entrypoint) else spec.args:
        if option == "-m" or not option.startswith("-"):
            break
        options.append(option)
    program, wrong = spec.entrypoint, [option for option in options if not OPTIONS.fullmatch(option)]
    reasons = {
        "workers are functions, which torch starts itself": callable(program),
        f"workers are started by {program}, not by this Python ({sys.executable})": program != sys.executable,
        f"{wrong and wrong[0]} is a Python option that a template cannot have": wrong,
        "torch binds workers to NUMA nodes when it starts them": spec.numa_options is not None,
        "this process is not the agent's own (owns_process), so it cannot adopt workers": not owns_process,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"Nothing can be preloaded here: {reason}. Remove preload.")


class WarmStart:
    """Keeps a template, and has torch start workers from it.

    Args:
        spec: of the workers.
        modules: what to import in the template.
        environment: what workers have in addition to this process' own.
        tree: of the workers, which has to spare the template.
        is_hurried: whether this node is about to leave, so that no template is worth waiting for.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        modules: Sequence[str],
        environment: Mapping[str, str],
        tree: ProcessTree,
        is_hurried: Callable[[], bool],
    ) -> None:
        arguments = substitute_local_rank(spec.args, spec.local_world_size - 1)
        self._command = [str(spec.entrypoint), *arguments]
        self._modules, self._own_environment, self._tree = modules, environment, tree
        self._is_hurried = is_hurried
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._hopeless = False  # another template would fail like the last one
        self._cold = False  # this group of workers starts without a template
        self._may_replace = True  # once for each group: what kills one template may kill the next

    def prepare(self) -> None:
        """Make a template unless there is one; its imports run in the background."""
        with self._lock:
            self._prepare({})

    def await_template(self) -> None:
        """Wait for the template that is being made, for as long as workers would."""
        with self._lock, contextlib.suppress(TimeoutError):  # logged if workers start without it
            if self._template is not None:
                self._settle(self._template, TEMPLATE_TIMEOUT)

    def tend(self) -> None:
        """Replace a template that was killed, then wait for the current one's end; call it repeatedly, from one thread.

        It returns at once while there is no template that is ready, and after ``END_TIMEOUT`` seconds in any case.
        """
        template = self._tended()
        if template and template.ready:
            template.await_end(END_TIMEOUT)

    def _tended(self) -> Template | None:
        if not self._lock.acquire(blocking=False):
            return None  # workers are being started
        try:
            template = self._template
            if template and not template.ready:
                with contextlib.suppress(TimeoutError):  # it is still importing
                    self._settle(template, 0.0)
            elif template and not template.lives():
                self._lose(template, "creating a new one" if self._may_replace else "the next workers get a new one")
                if self._may_replace:
                    self._may_replace = False
                    self._prepare(template.environment)
            return self._template
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the template; its workers are not touched."""
        with self._lock:
            self._hopeless = True
            self._drop()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Within the block, torch starts a group of workers."""
        with self._lock, starting_workers_with(self._start):
            self._cold, self._may_replace = False, True
            if self._template and (path := self._template.changed()):
                log.info("%s has changed: creating a new worker template.", path)
                self._drop()
            yield

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None
    ) -> Fork | None:
        """Start one worker; None: torch must."""
        template = self._fitting(environment)
        if template is None:
            return None
        try:
            return template.fork(command, environment, stdout, stderr)
        except TemplateError as e:
            self._drop()
            self._go_without(f"the template failed: {e}")
            return None

    def _fitting(self, environment: Mapping[str, str]) -> Template | None:
        """A template that can fork workers with this environment."""
        template = self._template
        if template and template.ready and not template.lives():
            self._lose(template)
        if self._template and _fixed(environment) != _fixed(self._template.environment):
            self._drop()
        if not self._cold:
            self._prepare(environment)
        template = self._template
        try:
            return template if template and not self._cold and self._settle(template, TEMPLATE_TIMEOUT) else None
        except TimeoutError as e:
            self._go_without(str(e))
            return None

    def _prepare(self, environment: Mapping[str, str]) -> None:
        if self._template is not None or self._hopeless:
            return
        try:
            combined = {**os.environ, **_fixed(environment), **self._own_environment}
            self._template = Template(self._command, self._modules, combined)
        except OSError as e:
            self._give_up(f"the template could not be started: {e}")
        else:
            self._tree.spare(self._template.pid)

    def _settle(self, template: Template, timeout: float) -> bool:
        """Whether a template can fork, once it has imported everything; it has ``timeout`` seconds from its start."""
        try:
            template.await_ready(timeout, self._is_hurried)
        except TemplateError as e:
            self._give_up(str(e))
        return template.ready

    def _lose(self, template: Template, then: str = "creating a new one") -> None:
        """Drop a template that was ready and has ended."""
        self._drop()
        log.warning("The worker template %s; %s.", template.describe_end(), then)

    def _give_up(self, why: str) -> None:
        self._hopeless = True
        self._drop()
        self._go_without(why)

    def _go_without(self, why: str) -> None:
        self._cold = True
        log.warning("Nothing is preloaded, and workers start as new processes: %s.", why)

    def _drop(self) -> None:
        if self._template is not None:
            self._template.close()
            if not self._template.lives():  # a living one stays spared
                self._tree.release(self._template.pid)
            self._template = None


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in which a worker must not differ from its template."""
    return {name: value for name, value in environment.items() if not VARYING.fullmatch(name)}
