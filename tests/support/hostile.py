"""Hostile words and values, and well-formed ones to spoil, for the fuzz tests."""

from __future__ import annotations

import math
import random
from typing import Any, Final

from tests.proofs.oracle_state import PROTOCOL

WORDS: Final = [
    *("", " ", "0", "-1", "1", "1.5", "1e5", "0x10", "nan", "inf", "-inf", "1e400", "9" * 400, "9" * 5000, str(2**63)),
    *("²", "٣", "é", "\u202e", "\x00", "\n", "\r\nSET a b\r\n", "\x1b[31m", "\x9b2J", "\x1b]0;x\x07", "[red]x[/]"),
    *("<script>alert(1)</script>", '"><svg onload=1>', "' or 1", "$x$", "{}", "{", "}", "*", "?", "[a-z]", "\\", "^"),
    *("%", "%s", "%41", "%ff", ":", "@", "/", "//", "#", "&", "=", ",", "::1", "[::1]", "localhost", "a" * 300),
    *("left", "member", "null", "true", "[" * 3000, '{"a":' * 3000, "started", "completed", "lost"),
    *("rank 99999999999 of 1", "after 1e9 s"),
    *(
        "constructor",
        "__proto__",
        "prototype",
        "hasOwnProperty",
        "toString",
        "__class__",
        "__dict__",
        "None",
        "undefined",
    ),
]
# Ids of entries of a stream.
LARGE_IDS: Final = [f"{ms}-{n}" for ms in (10**18 - 1, 2**63, 2**64 - 1) for n in (1, 2**64 - 2, 2**64 - 1)]
RAW: Final = [*(word.encode() for word in WORDS), b"\xff\xfe", b"\x80\x04\x95", b"\xed\xa0\x80", b"\x00" * 64]


class Dice(random.Random):
    """Draws hostile values, the same ones for the same seed, and spoils samples."""

    def word(self) -> str:
        roll = self.random()
        if roll < 0.6:
            return self.choice(WORDS)
        if roll < 0.9:
            return str(self.choice((self.randrange(10), self.randrange(2**32), self.randrange(2**70) - 2**69)))
        return "".join(chr(self.choice((self.randrange(128), self.randrange(0x3000), 0xD800))) for _ in range(9))

    def raw(self) -> bytes:
        return self.choice(RAW) if self.random() < 0.8 else self.word().encode("utf-8", "surrogatepass")

    def text(self) -> str:
        """Bytes of Redis, decoded as redelastic does."""
        return self.raw().decode(errors="replace")

    def spoil(self, sample: str) -> str:
        """A sample with up to three parts cut out, doubled or replaced."""
        for _ in range(self.randrange(4)):
            at, to = sorted(self.randrange(len(sample) + 1) for _ in range(2))
            to = min(to, at + self.choice((1, 4, 40)))
            sample = sample[:at] + self.choice(("", sample[at:to] * 2, self.word())) + sample[to:]
        return sample

    def spoil_raw(self, sample: bytes) -> bytes:
        return self.spoil(sample.decode("latin-1")).encode("utf-8", "surrogatepass")

    def number(self) -> Any:
        return self.choice((0, 1, -1, 3, 2**31, 2**53, 2**63, 10**400, 1e308, math.inf, math.nan, 0.5, True, None))

    def value(self, depth: int = 3) -> Any:
        """Any value of JSON."""
        roll = self.random()
        if depth and roll < 0.2:
            return [self.value(depth - 1) for _ in range(self.randrange(4))]
        if depth and roll < 0.4:
            return {self.choice((*FIELDS, self.word())): self.value(depth - 1) for _ in range(self.randrange(6))}
        return self.number() if roll < 0.7 else self.word()

    def status(self) -> dict[str, Any]:
        """A node's status: known fields with any values; mostly with lists of workers and GPUs."""
        made = {name: self.value(1) for name in self.sample(FIELDS, self.randrange(8))}
        for name in ("workers", "gpus"):
            if self.random() < 0.7:
                made[name] = [{f: self.value(0) for f in self.sample(FIELDS, 5)} for _ in range(self.randrange(3))]
        return made


FIELDS: Final = (  # of a node's status
    *("name", "host", "state", "pid", "agent", "restarts", "cpu", "memory", "memory_available", "memory_total"),
    *("epoch", "rank", "size", "local_rank", "step", "idle", "index", "uuid", "memory_used", "utilization"),
    *("temperature", "ecc", "xid", "xids", "lost", "node", "run_id", "job_restarts", "redis_away", "workers", "gpus"),
)
RECORD: Final = {  # of a run
    "protocol": str(PROTOCOL),
    **dict.fromkeys(("max", "limit"), "3"),
    **dict.fromkeys(("epoch", "size", "charged", "arrivals", "failed a-1-0123456789ab"), "2"),
    **dict.fromkeys(("min", "stop", "restarts", "idle", "failed_at", "restoring", "member_lost", "deadline"), "1"),
    **dict.fromkeys(("replacement", "lost", "progress"), "0"),
    **dict.fromkeys(("last_call", "interval", "lease", "ttl"), "60000"),
    **dict.fromkeys(("beat_at", "completed_at"), "1700000000000"),
    "master": "host 1234",
    "broken": '["lost","a-1-0123456789ab","cause","lease","silent_ms","6000"]',
    "closed": '["closed","","cause","asked","reason","why"]',
    "blamed": "a",
    "draining a-1-0123456789ab": "30000 by x",
    "written": "3145000",
    "flush_at": "1",
    "mark": "1-1",
    "many hung": '1700000000000 2 2 16 a b\n["idle_ms","6000"]',
}
NODES: Final = [f"{name}-{i}-{i:012x}" for i, name in enumerate(("a", "b", "c-d"))]
VALUES: Final = (
    "",
    "0",
    "1",
    "2",
    "6000",
    "-1",
    "9" * 30,
    "lease",
    "finished",
    "max_nodes",
    *NODES,
    " ".join(NODES),
    "{}",
)
