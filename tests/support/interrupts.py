"""Interrupts a call at each place where CPython may run a signal handler, which may raise."""

from __future__ import annotations

import dis
import functools
import gc
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

THREAD_TIMEOUT: Final = 30.0  # for a call in another thread, in seconds


class InterruptError(Exception):
    """Stands for the exception of a signal handler."""


def interrupt_everywhere(call: Callable[[], Any], check: Callable[[], Any], step: int = 1) -> int:
    """Call once for each ``step``-th place, interrupt the call there, and check; returns the number of interrupts."""
    times = 0
    while _interrupt(call, 1 + times * step):
        times += 1
        check()
    return times


def assert_thread_finishes(call: Callable[[], Any]) -> None:
    """Assert that a call in another thread finishes: no lock is left locked."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(THREAD_TIMEOUT)
    assert not thread.is_alive(), "another thread hangs"


def _interrupt(call: Callable[[], Any], place: int) -> bool:
    """Interrupt a call at its ``place``-th place; returns whether it has that many."""
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

    gc.disable()  # what it collects is other tests' too: an error in their callbacks would be nobody's to catch
    sys.settrace(trace)
    try:
        call()
    except InterruptError:
        pass
    finally:
        sys.settrace(None)
        gc.enable()
    return passed >= place


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions after which CPython runs signal handlers: calls, jumps back and entries."""
    names = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith(names))
