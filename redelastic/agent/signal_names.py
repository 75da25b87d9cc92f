"""Signal names for describing exit statuses; Python has none for most real-time signals."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL or SIGRTMIN+5."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"
