"""A program of its own: asks NVML what the GPUs need, and each visible device for a small matmul. 0: all are well.

``python -m redelastic.host.gpu_probe KIND EXPECTED``: KIND is ``cuda`` (or a stand-in for it, such as ``cpu``),
EXPECTED how many devices must be there (0: at least one GPU, if torch is built for GPUs). Each line about a device
starts with ``device INDEX:``; the last such line is about the device that failed, or that it was waiting for when it
was killed.
"""

from __future__ import annotations

import contextlib
import os
import sys


def ask_nvml() -> None:
    """Ask NVML whether a GPU needs a reset, or the like, before it takes new work.

    Raises:
        SystemExit: one of those visible does.
    """
    from redelastic.host.devices import list_devices  # noqa: PLC0415 - if NVML hangs, the parent can kill the probe
    from redelastic.host.gpus import assign  # noqa: PLC0415

    inventory = list_devices()
    visible = set()
    with contextlib.suppress(ValueError):  # CUDA does not see the GPUs that are named: it says so itself
        visible = {gpu.index for gpu in assign(1, share=True, environ=os.environ, ask=lambda: inventory).visible}
    for device in inventory.devices or ():
        if device.recovery and device.index in visible:
            raise SystemExit(f"GPU {device.index} ({device.uuid}) needs {device.recovery}, says NVML")


def ask_devices(kind: str, expected: int) -> None:
    """Have each device compute a matmul, one by one.

    Raises:
        SystemExit: a device is missing, raises an error or computes wrongly.
    """
    import torch  # noqa: PLC0415 - if this import hangs, the parent can kill the probe

    count = torch.cuda.device_count() if kind == "cuda" else torch.cpu.device_count()
    needed = expected or int(kind == "cuda" and torch.backends.cuda.is_built())
    # Small whole numbers: their products are exact, in any precision that the device uses.
    left, right = (torch.arange(256 * 256, dtype=torch.float32).reshape(256, 256) % n for n in (7, 5))
    right_answer = left @ right
    for index in range(max(count, needed)):
        device = f"device {index}:"
        if index >= count:
            raise SystemExit(
                f"{device} is not there: torch {torch.__version__} sees {count} of {needed}, with "
                f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
            )
        print(device, "was asked for a matmul", flush=True)  # noqa: T201 - the parent reads it
        try:
            answer = (left.to(f"{kind}:{index}") @ right.to(f"{kind}:{index}")).cpu()
        except RuntimeError as e:  # torch's AcceleratorError and OutOfMemoryError are such errors
            raise SystemExit(f"{device} {type(e).__name__}: {str(e).splitlines()[0]}") from e
        if not torch.equal(answer, right_answer):
            wrong = int((answer != right_answer).sum())
            raise SystemExit(f"{device} computes wrong, in {wrong} of {answer.numel()} elements of a matmul")


if __name__ == "__main__":
    if sys.argv[1] == "cuda":
        ask_nvml()
    ask_devices(sys.argv[1], int(sys.argv[2]))
