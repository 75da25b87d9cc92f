"""The assignment of GPUs to this node's workers.

Two conventions, both torch's:

- Shared view (torchrun's default): every worker sees all GPUs that the agent sees and takes ``cuda:{LOCAL_RANK}``.
  Nothing is added to its environment.
- Isolation (``--virtual-local-rank``): a worker sees one GPU only, named in its ``CUDA_VISIBLE_DEVICES``; its
  ``LOCAL_RANK`` is 0, so ``cuda:{LOCAL_RANK}`` is right again.

Two cases need isolation, whatever the user chose. A CUDA process can use at most one MIG device, so workers that see
several would all take the first one. And when workers share GPUs, ``LOCAL_RANK`` exceeds the number of GPUs, so
``cuda:{LOCAL_RANK}`` does not exist. (NCCL refuses two ranks of one host on a GPU: workers that share GPUs need gloo.)

``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it, here and nowhere else: the list ends before the first entry that
names no GPU. It is checked against NVML; without ``pynvml`` (an extra: the package nvidia-ml-py) torch's count of GPUs
is all that is known, and names are passed on unchecked.

Without isolation there may be more workers than GPUs, as under torchrun: the job may use no GPUs.

The order of indices: NVML follows the PCI bus; CUDA's default (``CUDA_DEVICE_ORDER=FASTEST_FIRST``) starts with the
fastest. They are assumed to agree on a host with GPUs of one model, and with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
Elsewhere redelastic does not guess which GPU an index means: the worker gets the name unchanged, which is right under
either order, and NVML's name for it stays unknown.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .devices import Device, Inventory, take_inventory

log = logging.getLogger(__name__)

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG device, that this job may use.

    Attributes:
        id: its name in ``CUDA_VISIBLE_DEVICES``: an index, or a UUID.
        index: of the GPU (for a MIG device: of the GPU that it is part of) in NVML's order; None if unknown.
        uuid: as NVML and ``nvidia-smi -L`` show it; None if unknown.
        model: such as ``NVIDIA H200``; None if unknown.
        mig: whether it is a MIG device.
    """

    id: str
    index: int | None = None
    uuid: str | None = None
    model: str | None = None
    mig: bool = False


@dataclass(frozen=True)
class Assignment:
    """The GPUs of a node's workers.

    Attributes:
        gpus: the GPU of each worker, by local rank; empty if the job has none, or has fewer than workers and does not
            share them.
        visible: the GPUs to watch, each known to NVML: the job's, or all of the host's if the job's are
            unknown; empty if NVML cannot list them.
        isolate: whether each worker must see its own GPU only (``WorkerSpec.virtual_local_rank``).
    """

    gpus: tuple[Gpu, ...] = ()
    visible: tuple[Gpu, ...] = ()
    isolate: bool = False

    def isolate_worker(self, local_rank: int, env: MutableMapping[str, Any]) -> None:
        """Have the worker of ``local_rank`` see its own GPU only.

        Args:
            local_rank: of the worker.
            env: its environment, as torch's agent isolates the worker of local rank 0. (Another worker's has the
                ``local_rank``-th name in the agent's ``CUDA_VISIBLE_DEVICES``, or the local rank itself: wrong for MIG
                devices, wrong for shared GPUs.) This sets each variable in it that names visible devices, since torch
                knows which of them this platform honours.
        """
        for name in {VISIBLE, *(name for name in env if name.endswith("_VISIBLE_DEVICES"))}:
            env[name] = self.gpus[local_rank].id


def assign(
    local_world_size: int,
    *,
    share: bool,
    isolate: bool = False,
    environ: Mapping[str, str],
    ask: Callable[[], Inventory] = take_inventory,
) -> Assignment:
    """Give each worker of this node a GPU.

    Args:
        local_world_size: number of workers on this node.
        share: whether workers may share GPUs, assigned round-robin, if there are fewer GPUs than workers.
        isolate: whether each worker sees its own GPU only.
        environ: the agent's environment.
        ask: lists the GPUs of this host.

    Returns:
        No GPU for any worker if the job has none: on a host without GPUs, or with an empty ``CUDA_VISIBLE_DEVICES``; or
        if there are fewer GPUs than workers, and they are neither shared nor isolated.

    Raises:
        DriverError: the GPU driver does not answer within a minute, or fails.
        ValueError: there are fewer GPUs than workers, each worker must see its own, and ``share`` is False; or
            ``CUDA_VISIBLE_DEVICES`` names a GPU twice, names one that cannot be used, or starts with one that does not
            exist; or none of the host's can be used.
    """
    named = _names_for_host(environ[VISIBLE], ask) if VISIBLE in environ else None
    if named == []:
        return Assignment()
    inventory = ask()
    if inventory.fault:
        log.warning("%s", inventory.fault)
    devices, faults = inventory.devices, ""
    visible: tuple[Gpu, ...] = ()
    if not devices:
        pool = _counted(inventory.counted, named) if devices is None else []
    else:
        same_order = environ.get(ORDER) == "PCI_BUS_ID" or len({d.model for d in devices}) == 1
        if named is None:
            pool = _all(devices, same_order=same_order)
            faults = "".join(f" GPU {d.index} cannot be used: {d.fault}." for d in devices if d.fault)
        else:
            pool = _named(named, devices, same_order=same_order)
            _require_distinct([gpu.uuid for gpu in pool if gpu.uuid is not None], environ[VISIBLE])
        certain = named is not None and all(gpu.index is not None for gpu in pool)
        visible = tuple(pool if certain else (gpu for d in devices for gpu in _known(d)))
    if not pool and faults:
        raise ValueError(f"No GPU of this host can be used.{faults} For a job without GPUs, set {VISIBLE} to nothing.")
    if not pool:
        return Assignment()
    if local_world_size > len(pool) and not share:
        where = f"{VISIBLE}={environ[VISIBLE]} has" if named is not None else "this host has"
        fewer = (
            f"{local_world_size} workers were requested, but {where} {len(pool)} GPU{'s' * (len(pool) > 1)}.{faults}"
        )
        what_to_do = (
            f"Use --nproc-per-node={len(pool)}, or --share-gpus to let several workers use one GPU, "
            f"or set {VISIBLE} to nothing for a job without GPUs."
        )
        if isolate:
            raise ValueError(f"{fewer} {what_to_do}")
        log.warning("%s Workers that use GPUs will fail. %s", fewer, what_to_do)
        return Assignment(visible=visible)
    return Assignment(
        gpus=tuple(pool[rank % len(pool)] for rank in range(local_world_size)),
        visible=visible,
        isolate=local_world_size > len(pool) or any(gpu.mig for gpu in pool),
    )


def why_hidden(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Why a node does not report its GPUs although the host has some; empty if it does, or has none."""
    if importlib.util.find_spec("pynvml") is not None or not driver.is_dir() or not any(driver.iterdir()):
        return ""
    return "redelastic[gpu] is not installed"


# -- what NVML shows


def _known(device: Device) -> list[Gpu]:
    """A device, under the names that NVML knows."""
    if device.instances:
        return [Gpu(i.uuid, device.index, i.uuid, device.model, mig=True) for i in device.instances]
    return [Gpu(device.uuid or str(device.index), device.index, device.uuid, device.model)]


# -- what CUDA makes of CUDA_VISIBLE_DEVICES


def visible_names(value: str) -> list[str]:
    """The names in ``CUDA_VISIBLE_DEVICES`` up to where CUDA stops: at -1, a non-name, or a name of another kind.

    Raises:
        ValueError: a name occurs twice.
    """
    names: list[str] = []
    for part in value.split(","):
        name = part.strip()
        kind = _kind(name)
        if not kind or (names and kind != _kind(names[0])):
            if name and not re.fullmatch(r"-\d+", name):
                log.warning("%s=%s: CUDA sees no GPU from %r on; it expects indices or UUIDs.", VISIBLE, value, name)
            break
        names.append(str(int(name)) if kind == "index" else name)
    _require_distinct(names, value)
    return names


def _names_for_host(value: str, ask: Callable[[], Inventory]) -> list[str]:
    """Read names as :func:`visible_names` does; on a host without GPUs there are none, and no error."""
    try:
        return visible_names(value)
    except ValueError:
        if ask() == Inventory():
            return []
        raise


def _kind(name: str) -> str:
    if re.fullmatch(r"\+?[0-9]+", name):
        return "index"
    return name[:4] if name.startswith(("GPU-", "MIG-")) else ""


def _all(devices: Sequence[Device], *, same_order: bool) -> list[Gpu]:
    """The GPUs of a host if ``CUDA_VISIBLE_DEVICES`` is not set."""
    if any(d.instances or d.fault for d in devices):  # then CUDA's indices are not NVML's
        return [gpu for d in devices if not d.fault for gpu in _known(d)]
    return [gpu for i in range(len(devices)) for gpu in _find(str(i), devices, same_order=same_order)]


def _named(names: Sequence[str], devices: Sequence[Device], *, same_order: bool) -> list[Gpu]:
    """The GPUs that ``names`` refer to, up to the first name that refers to none.

    Raises:
        ValueError: that is the very first name, or a GPU cannot be used.
    """
    found: list[Gpu] = []
    for name in names:
        try:
            found += _find(name, devices, same_order=same_order)
        except LookupError as e:  # noqa: PERF203
            if not found:
                raise ValueError(str(e)) from e
            log.warning("%s CUDA sees no GPU from there on.", e)
            break
    return found


def _find(name: str, devices: Sequence[Device], *, same_order: bool) -> list[Gpu]:
    """The GPU that a name refers to, or all MIG devices of that GPU.

    Raises:
        LookupError: there is none, or the name is ambiguous.
        ValueError: it cannot be used.
    """
    what = f"{VISIBLE} names {name}, but"
    if name.startswith("MIG-"):
        migs = [
            Gpu(i.uuid if i.uuid.startswith(name) else name, d.index, i.uuid, d.model, mig=True)
            for d in devices
            for i in d.instances
            if i.uuid.startswith(name) or i.legacy == name
        ]
        if len(migs) != 1:
            how_many = f"{len(migs)} MIG devices" if migs else "no MIG device"
            raise LookupError(f"{what} {how_many} of this host has that name; nvidia-smi -L lists them.")
        return migs
    if name.startswith("GPU-"):
        found = [d for d in devices if d.uuid is not None and d.uuid.startswith(name)]
        if len(found) != 1:
            how_many = f"the UUIDs of {len(found)} GPUs begin" if found else "no GPU's UUID on this host begins"
            raise LookupError(f"{what} {how_many} with that; nvidia-smi -L lists them.")
        device = found[0]
    else:
        if int(name) >= len(devices):
            raise LookupError(f"{what} the last GPU of this host is {len(devices) - 1}; nvidia-smi -L lists them.")
        if not same_order:
            return [Gpu(name)]
        device = devices[int(name)]
    if device.fault:
        raise ValueError(f"{what} that GPU cannot be used: {device.fault}.")
    return _known(device) if device.instances else [Gpu(name, device.index, device.uuid, device.model)]


def _require_distinct(names: Sequence[str], value: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{VISIBLE}={value} names {name} twice; CUDA takes each GPU once.")


def _counted(count: int, named: Sequence[str] | None) -> list[Gpu]:
    """The GPUs if NVML cannot list them, going by how many torch sees."""
    if named is None:
        return [Gpu(str(i)) for i in range(count)]
    mig = named[0].startswith("MIG-")  # of MIG devices, CUDA counts the first one only
    return [Gpu(name, mig=mig) for name in (named if mig and count else named[:count])]
