"""The bootstrap store of a round: a port that a node takes before it joins, and serves if it becomes rank 0."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import socket
import threading
from datetime import timedelta
from typing import Final

import torch.distributed as dist

log = logging.getLogger(__name__)

RETRY_PAUSE: Final = 0.5  # in seconds
_dual_stack = functools.cache(socket.has_dualstack_ipv6)  # cached, since each call opens a socket


def _bound(host: str) -> tuple[socket.socket, str] | None:
    """A socket at one address of this host; None if ``host`` is not one."""
    try:
        family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
    except ValueError:
        return None
    listener = socket.socket(family)
    try:
        listener.bind((host, 0))
    except OSError:
        listener.close()
        return None
    return listener, host


def _bound_everywhere() -> socket.socket:
    dual = _dual_stack()
    listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    if dual:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("", 0))
    return listener


class BootstrapPort:
    """A free port of this host.

    It is bound before the rendezvous, so that every member knows rank 0's port as soon as the round completes.
    Workers may connect once :meth:`serve` was called: the kernel queues them until the store answers.

    Args:
        host: the announced address. If it is one of this host, the port is at no other: the store has no password.
            A name may mean another address to peers, so with a name the port is at all of this host's.
    """

    def __init__(self, host: str = "") -> None:
        self._listener, self._host = _bound(host) or (_bound_everywhere(), "localhost")
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._store: dist.TCPStore | None = None

    def serve(self, timeout: float) -> None:
        """Serve a fresh TCPStore.

        It starts in the background: torch's constructor looks up names, and a slow name server must not delay the
        round.

        Args:
            timeout: of the store, in seconds.
        """
        self._listener.listen(2048)
        # Not a daemon: C++ aborts a process that exits while torch's constructor runs in another thread, so exit waits.
        args = (self._listener.dup(), timeout)
        threading.Thread(target=self._serve, args=args, name="redelastic-bootstrap", daemon=False).start()

    def _serve(self, listener: socket.socket, timeout: float) -> None:
        with listener:  # a descriptor of this thread's own: close() frees the port's, whose number may be used again
            while not self._closed.is_set() and threading.main_thread().is_alive():
                try:
                    store = dist.TCPStore(
                        self._host,  # where this process connects to itself
                        self.port,
                        is_master=True,
                        wait_for_workers=False,
                        timeout=timedelta(seconds=timeout),
                        master_listen_fd=os.dup(listener.fileno()),  # the store closes it
                    )
                except (RuntimeError, OSError) as e:  # noqa: PERF203
                    if not self._closed.is_set():
                        log.warning("The bootstrap store on port %s did not start, retrying: %s", self.port, e)
                    self._closed.wait(RETRY_PAUSE)
                else:
                    if not self._closed.is_set():
                        self._store = store
                    return

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._closed.set()
        self._store = None
        self._listener.close()
