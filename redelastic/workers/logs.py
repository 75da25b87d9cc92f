"""The workers' log files, and their last lines without the secrets that they may hold."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

TAIL: Final = 4096  # of a log, in characters
STDOUT_TAIL: Final = 1024  # of a worker's stdout that is not the log itself, in characters
SEARCHED_TAIL: Final = 4 * TAIL  # searched for secrets, in characters: one may reach into the tail
READ_BYTES: Final = 1 << 20  # of a log: a progress bar is a long line of which a terminal shows the end
HIDDEN: Final = "[hidden]"
SHORTEST_SECRET: Final = 6  # characters of a variable's value; hiding shorter ones would hide half the text

_NAMES: Final = re.compile(
    r"(?:^|_)(?:\w*key|token|secret|passw(?:or)?d|pass|credentials?|auth)(?:_|$)", re.IGNORECASE
)  # not GIT_AUTHOR_NAME
_NO_SECRETS: Final = re.compile(
    r"_(?:prefix|suffix|names?|type|kind|ids?|files?|path|dir|folder|count|size|limit|length|timeout|ttl|mode|method|"
    r"ur[li]|host|port|user|region|version|enabled|format|algorithm|provider)$",
    re.IGNORECASE,
)  # as SSH_KEY_NAME, which is about a secret
_OF_A_TOKENIZER: Final = "".join(
    f"(?<!{word}[_ ])"
    for word in "pad eos bos unk sep cls mask special image stop next last first max min num per".split()  # noqa: SIM905
)
_KEY_BLOCKS: Final = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\A.*-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),  # whose start is not in the tail
)
_IN_URL: Final = re.compile(r"(\w://[^/\s:@]*:)[^@\s]+(?=@)")
_NAMED: Final = re.compile(
    rf"((?:passw(?:or)?d|secret|{_OF_A_TOKENIZER}token|credentials?|(?:api|access|secret|private|account)[_-]?key)[\"']?\s*[=:]\s*)"
    r"(?:\"[^\"]*\"|'[^']*'|\S+)",
    re.IGNORECASE,
)
_KNOWN: Final = re.compile(
    r"(?<=Bearer )\S+|(?<=Basic )\S+|\b(?:AKIA[0-9A-Z]{12,}|hf_\w{16,}|gh[a-z]_\w{16,}|sk-[\w-]{16,}|xox\w-[\w-]{10,}|"
    r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)


def log_files(stdouts: Mapping[int, str], stderrs: Mapping[int, str]) -> dict[int, str]:
    """The file that a worker's errors go to, by local rank; no entry for what goes to a terminal or a pipe.

    Args:
        stdouts: as torch's ``PContext`` has them: a path, or empty for the agent's own stream.
        stderrs: likewise.
    """
    own, _ = own_log()
    found = {rank: path or own for rank, path in stderrs.items()}
    for rank, path in stdouts.items():
        if found.get(rank, os.devnull) == os.devnull:
            found[rank] = path
    return {rank: path for rank, path in sorted(found.items()) if path and path != os.devnull}


def own_log() -> tuple[str, int]:
    """The file that this process' stderr goes to, such as Slurm's output file, and its size; empty if there is none."""
    try:
        status = os.fstat(2)
        return (str(Path("/proc/self/fd/2").readlink()), status.st_size) if stat.S_ISREG(status.st_mode) else ("", 0)
    except OSError:
        return "", 0


def tail(path: str, length: int = TAIL, start: int = 0) -> str:
    """The last lines of a file as a terminal shows them, without secrets; empty if it cannot be read.

    A line that is too long loses its beginning.

    Args:
        path: of the file.
        length: of the text, in characters.
        start: where the lines begin that count, in bytes.
    """
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END) - start
            if size < 0:  # somebody has cut the file
                start, size = 0, size + start
            file.seek(start + max(0, size - READ_BYTES))
            text = file.read(READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return end_of(text, length, cut=size > READ_BYTES)


def end_of(text: str, length: int = TAIL, *, cut: bool) -> str:
    """The last lines of an output as a terminal shows them, without secrets.

    Args:
        text: at least ``SEARCHED_TAIL`` characters of it, or all.
        length: of the result, in characters.
        cut: whether its beginning is missing.
    """
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    if cut or len(text) > SEARCHED_TAIL:
        first, *lines = text[-SEARCHED_TAIL:].split("\n")
        text = "\n".join([first[length:], *lines])  # at its start a secret may be cut in two
    text = redacted(text, os.environ).strip("\n")
    if len(text) <= length:
        return text
    text = text[1 - length :]
    return text.partition("\n")[2] or f"…{text}"


def last_lines(path: str, start: int = 0) -> str:
    """The last lines of a worker's log; of torch's ``stderr.log``, after a few of the ``stdout.log`` beside it.

    Args:
        path: of the log.
        start: as for :func:`tail`.
    """
    log = Path(path)
    out = tail(str(log.with_name("stdout.log")), STDOUT_TAIL) if log.name == "stderr.log" else ""
    return "\n".join(filter(None, (out and f"stdout.log:\n{out}\n{log.name}:", tail(path, start=start))))


def command_of(spec: WorkerSpec) -> str:
    """The workers' command as one types it, without this interpreter and the option that torch gives it."""
    if not isinstance(spec.entrypoint, str):
        return str(spec.get_entrypoint_name())
    words = list(map(str, spec.args))
    if spec.entrypoint != sys.executable:
        words.insert(0, spec.entrypoint)
    elif words[:1] == ["-u"]:
        del words[0]
    return command_line(words, os.environ)


def command_line(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """A command as one types it; values are hidden by the names of their flags, too."""
    return " ".join(word if HIDDEN in word else shlex.quote(word) for word in redacted_words(words, environ))


def redacted_words(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words of a command :func:`redacted`; values are hidden by the names of their flags, too."""
    shown = []
    for before, word in itertools.pairwise(["", *words]):
        name, sign, _ = word.partition("=")
        if sign and _names_secret(name):
            shown.append(f"{name}={HIDDEN}")
        elif before.startswith("-") and _names_secret(before) and not word.startswith("--"):
            shown.append(HIDDEN)
        else:
            shown.append(redacted(word, environ))
    return shown


def _names_secret(flag: str) -> bool:
    """Whether a flag's value, or that of a setting like ``db.password``, is a secret."""
    return _is_secret(flag.lstrip("-").replace("-", "_").rpartition(".")[2])


def _is_secret(name: str) -> bool:
    return bool(_NAMES.search(name) and not _NO_SECRETS.search(name))


def redacted(text: str, environ: Mapping[str, str]) -> str:
    """``text`` without passwords in URLs, values named as secrets, keys of known forms, and secrets of ``environ``.

    It hides what it recognises, and may hide too much; no rule finds every secret that a program can print.
    """
    secrets = [value for name, value in environ.items() if _is_secret(name)]
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= SHORTEST_SECRET and not value.startswith("/"):  # a path is not a secret
            text = text.replace(value, HIDDEN)
    for block in _KEY_BLOCKS:
        text = block.sub(HIDDEN, text)
    for pattern in (_IN_URL, _NAMED):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _KNOWN.sub(HIDDEN, text)
