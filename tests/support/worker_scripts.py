"""Scripts that stand for workers and use `redelastic.worker`: run to their end, or line by line."""

from __future__ import annotations

import os
import subprocess
import sys

from typing_extensions import Self


def run(code: str, environment: dict[str, str]) -> str:
    """Run a script to its end; returns its output, and asserts that it has succeeded without errors."""
    command = [
        sys.executable,
        "-c",
        "import os, sys\nfrom redelastic.worker import *\n" + code,
    ]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


class Dialogue:
    """A script, a worker's or an agent's, that goes on at each line that the test sends."""

    def __init__(self, code: str, environment: dict[str, str]) -> None:
        head = "import os, sys\nfrom redelastic.worker import *\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", head + code],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def next(self) -> str:
        self.say("")
        return self.answer()
