"""This machine and this installation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
from collections.abc import Iterator
from functools import partial
from typing import Final

from redelastic import torch_internals
from redelastic.host.devices import DriverError, take_inventory
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import Endpoint
from redelastic.redis.errors import UnavailableError
from redelastic.redis.routes import is_loopback
from redelastic.rendezvous.addresses import (
    INTERFACE_VARIABLES,
    LocalAddress,
    find_address,
    interface_of,
    interfaces,
    meant_by_hostname,
    set_by_user,
)

from .finding import Finding, Level, finding

SUPPORTED_REDIS_PY: Final = "8"
GPU_LIMIT: Final = 5.0  # for the driver to answer, in seconds
GLOO_VARIABLE: Final = INTERFACE_VARIABLES[0]
MIN_FILES: Final = 1024  # an agent of 8 workers has about 200 open
MIN_SHM_BYTES: Final = 512 * 2**20  # NCCL and DataLoader's workers share memory there; a container has 64 MiB
SHM: Final = "/dev/shm"  # noqa: S108  (only looked at, never written to)


_found: Final = partial(finding, "host")


def examine_host(endpoint: Endpoint, connection: Connection | None) -> Iterator[Finding]:
    """Examine this machine; ``connection`` is None if Redis was not reached."""
    yield _installed_torch()
    yield _version("redis-py", importlib.metadata.version("redis"), SUPPORTED_REDIS_PY)
    yield _found("python", "ok", platform.python_version())
    yield _torchrun()
    yield from _addresses(endpoint, connection)
    yield _gpus()
    yield _files()
    yield from _shared_memory()


def _version(name: str, version: str, supported: str) -> Finding:
    level: Level = "ok" if f"{version}.".startswith(f"{supported}.") else "problem"
    return _found(name, level, version, f"Install {name} {supported}, the version that redelastic was tested with.")


def _installed_torch() -> Finding:
    try:
        version = torch_internals.require_torch()
    except ImportError as e:
        return _found("torch", "problem", "missing or too old", str(e))
    return _torch(version, torch_internals.missing())


def _torch(version: str, missing: list[str]) -> Finding:
    newest = ".".join(map(str, torch_internals.NEWEST_TESTED))
    if missing:
        return _found("torch", "problem", f"{version}: {'; '.join(missing)}", f"Install torch {newest}.")
    if torch_internals.version_of(version) > torch_internals.NEWEST_TESTED:
        found = f"{version}, newer than the tested versions; it has everything that redelastic uses"
        return _found("torch", "note", found, f"If something fails, try torch {newest}.")
    return _found("torch", "ok", version)


def _torchrun() -> Finding:
    registered = importlib.metadata.entry_points(group="torchrun.handlers", name="redis")
    if any(entry.value.startswith("redelastic.") for entry in registered):
        return _found("torchrun", "ok", "knows --rdzv-backend=redis")
    advice = "Install redelastic with pip into the environment that torchrun runs in."
    return _found("torchrun", "problem", "does not know --rdzv-backend=redis", advice)


def is_local(endpoint: Endpoint) -> bool:
    """Whether Redis is on this host, going by the endpoint."""
    return all(host == "localhost" or is_loopback(host) for host, _ in endpoint.hosts)


def _addresses(endpoint: Endpoint, connection: Connection | None) -> Iterator[Finding]:
    try:
        address = find_address(None, connection.local_address() if connection else None)
    except UnavailableError:  # it was reached just now
        connection, address = None, find_address(None, None)
    yield _address(endpoint, address, reached=connection is not None)
    yield _gloo(address, meant_by_hostname(), set_by_user(GLOO_VARIABLE))


def _address(endpoint: Endpoint, address: LocalAddress, *, reached: bool) -> Finding:
    if not is_loopback(address.host):
        return _found("address", "ok", f"peers get {address}")
    found = f"peers get {address}, which only this host reaches"
    if is_local(endpoint):
        return _found("address", "note", found, "This is enough for nodes on this host.")
    if not reached:
        return _found("address", "note", "unknown: it is the address by which this host reaches Redis")
    advice = "Give each node an address that its peers can reach, or its interface, with --local-addr."
    return _found("address", "problem", found, advice)


def _gloo(address: LocalAddress, meant: str, chosen: str) -> Finding:
    """Where gloo listens: it chooses by itself, and need not choose as NCCL does."""
    if chosen:
        if missing := [name for name in chosen.split(",") if name not in interfaces()]:
            advice = f"gloo fails with that: it takes no patterns. Unset it, or use one of {', '.join(interfaces())}."
            return _found("gloo", "problem", f"{GLOO_VARIABLE}={chosen}: there is no {missing[0]}", advice)
        return _found("gloo", "ok", f"listens on {chosen}, as {GLOO_VARIABLE} says")
    if address.interface:
        found = f"this host's name resolves to {meant or 'no address of its own'}, so workers get {GLOO_VARIABLE}="
        return _found("gloo", "ok", found + address.interface)
    listens = interface_of(meant) if meant else "lo"
    if is_loopback(address.host) or interface_of(address.host) == listens:
        return _found("gloo", "ok", f"listens on {listens}, as this host's name resolves")
    found = f"listens on {listens}, as this host's name resolves, but peers get {address}"
    return _found("gloo", "note", found, f"If peers cannot reach it there, set {GLOO_VARIABLE} or --local-addr.")


def _gpus() -> Finding:
    if importlib.util.find_spec("pynvml") is None:  # an extra
        missing = "not checked: nvidia-ml-py is not installed"
        return _found("gpu", "note", missing, "pip install 'redelastic[gpu]'")
    try:
        inventory = take_inventory(GPU_LIMIT)
    except DriverError as e:
        return _found("gpu", "warning", "the driver does not respond", str(e))
    if inventory.fault:
        return _found("gpu", "warning", inventory.fault, "See nvidia-smi.")
    if inventory.devices is None:
        return _found("gpu", "note", "no NVIDIA driver")
    count = len(inventory.devices)
    found = f"{count}, driver {inventory.driver}"
    if faults := [f"GPU {device.index}: {device.fault}" for device in inventory.devices if device.fault]:
        return _found("gpu", "problem", f"{found}; {'; '.join(faults)}", "See nvidia-smi and dmesg.", gpus=count)
    return _found("gpu", "ok" if count else "note", found, gpus=count)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _found("open-files", "ok", "no limit")
    most = "unlimited" if hard == resource.RLIM_INFINITY else f"at most {hard:,}"
    level: Level = "ok" if soft >= MIN_FILES else "warning"
    return _found("open-files", level, f"up to {soft:,}", f"Raise it with ulimit -n ({most}).", limit=soft)


def _shared_memory() -> Iterator[Finding]:
    try:
        free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    except OSError:  # not Linux
        return
    level: Level = "ok" if free >= MIN_SHM_BYTES else "warning"
    advice = "NCCL and DataLoader need more: --shm-size=1g for Docker, an emptyDir with medium: Memory in Kubernetes."
    yield _found("shared-memory", level, f"{free / 2**20:,.0f} MiB free in {SHM}", advice, free_bytes=free)
