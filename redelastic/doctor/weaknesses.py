"""Known weaknesses of Redis and Valkey that anyone who may use a run, or merely reaches the server, can exploit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Version = tuple[int, int, int]
Line = tuple[int, int]  # a release line, such as 7.2


@dataclass(frozen=True)
class Weakness:
    """A weakness that lets an attacker run code on the server.

    Attributes:
        name: its CVE number.
        product: ``redis`` or ``valkey``.
        fixed: first patch release with the fix, by release line; later lines never had the weakness.
        needs_tls: whether only servers that speak TLS have it.
    """

    name: str
    product: str
    fixed: Mapping[Line, int]
    needs_tls: bool = False

    def affects(self, product: str, version: Version, *, tls: bool) -> bool:
        """Whether a server of this version has it."""
        line, patch = version[:2], version[2]
        if product != self.product or (self.needs_tls and not tls):
            return False
        return patch < self.fixed[line] if line in self.fixed else line < max(self.fixed)


# A user who may run scripts, as every user of a run may, can escape Lua's sandbox. The releases of October 2025
# also fix CVE-2025-46817, -46818 and -46819.
# TLS: anyone who merely connects (Redis), or logs in (Valkey), can run code.
WEAKNESSES: Final = (
    # CVE record of GHSA-39h2-x6c4-6w4c (6.2.17, 7.2.7, 7.4.2).
    Weakness("CVE-2024-46981", "redis", {(6, 2): 17, (7, 2): 7, (7, 4): 2}),
    # GHSA-4789-qfc9-5f9q; docker-library/official-images#20011 lists the releases.
    Weakness("CVE-2025-49844", "redis", {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2}),
    # Valkey's release notes; osv.dev BIT-valkey-2025-46818 for the same releases.
    Weakness("CVE-2025-49844", "valkey", {(7, 2): 11, (8, 0): 6, (8, 1): 4}),
    # CISA VA-26-239-01, version 2.0.0.
    Weakness(
        "CVE-2026-81934",
        "redis",
        {(6, 2): 24, (7, 2): 16, (7, 4): 11, (8, 2): 9, (8, 4): 6, (8, 6): 6, (8, 8): 2, (8, 10): 1},
        needs_tls=True,
    ),
    # Valkey's releases of 21 July 2026.
    Weakness("CVE-2026-56684", "valkey", {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1}, needs_tls=True),
)


def weaknesses_of(product: str, version: Version, *, tls: bool) -> list[Weakness]:
    """The weaknesses that a server of this version has, as its makers released it."""
    return [w for w in WEAKNESSES if w.affects(product, version, tls=tls)]


def mended_in(known: list[Weakness], line: Line) -> str:
    """The release to update to: the first without any of them, in the same line if there is one."""
    lines = set.intersection(*(set(weakness.fixed) for weakness in known))
    for major, minor in sorted(later for later in lines if later >= line):
        return f"{major}.{minor}.{max(weakness.fixed[major, minor] for weakness in known)}"
    return "a newer release line"
