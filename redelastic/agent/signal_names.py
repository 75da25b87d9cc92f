"""What signals are called where an exit status is described; Python has no names for most of the real-time ones."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL or SIGRTMIN+5."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"
