"""Exceptions at every place where one of a signal handler may be raised."""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

THREAD_TIMEOUT: Final = 30.0  # within which another thread has to get through, in seconds


class InterruptError(Exception):
    """As a signal handler raises it."""


def interrupt_everywhere(call: Callable[[], Any], check: Callable[[], Any], step: int = 1) -> int:
    """Interrupt a call at each ``step``-th place in turn, and check afterwards; returns how often."""
    times = 0
    while _interrupt(call, 1 + times * step):
        times += 1
        check()
    return times


def assert_thread_finishes(call: Callable[[], Any]) -> None:
    """Assert that a call ends in another thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(THREAD_TIMEOUT)
    assert not thread.is_alive(), "another thread hangs"


def _interrupt(call: Callable[[], Any], place: int) -> bool:
    """Interrupt a call at its ``place``-th place; returns whether it has so many."""
    passed = 0
    may_interrupt = False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed, may_interrupt
        frame.f_trace_opcodes = True
        if event == "opcode":
            if may_interrupt:
                passed += 1
                if passed == place:
                    sys.settrace(None)
                    raise InterruptError
            may_interrupt = frame.f_lasti in _places(frame.f_code)
        return trace

    sys.settrace(trace)
    try:
        call()
    except InterruptError:
        pass
    finally:
        sys.settrace(None)
    return passed >= place


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions behind which CPython runs signal handlers: calls, jumps back and entries."""
    names = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith(names))
