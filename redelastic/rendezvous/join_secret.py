"""Proofs that a node has the job's join secret: pure functions, without the secret's file and without Redis."""

from __future__ import annotations

import hmac
import json
from typing import Final, NamedTuple

_PROOF: Final = "redelastic node"  # labels of the two kinds of messages: none is valid as the other
_ATTESTATION: Final = "redelastic round"


class Facts(NamedTuple):
    """What all members of a round agree on: no proof of one round is valid in another.

    Attributes:
        key_prefix, run_id, incarnation: of the run.
        epoch, size, completed_at: of the round.
        host, port: that rank 0 announces.
    """

    key_prefix: str
    run_id: str
    incarnation: str
    epoch: int
    size: int
    completed_at: int
    host: str
    port: int


def prove(secret: bytes, facts: Facts, rank: int, node: str) -> bytes:
    """Prove that a node of a round has the secret: its id, and an HMAC over the round, its rank and its id."""
    return f"{_mac(secret, _PROOF, facts, rank, node)} {node}".encode("utf-8", "surrogateescape")


def verify(secret: bytes, facts: Facts, rank: int, proof: bytes | None) -> bool:
    """Whether a proof, which anyone may have written, shows that the node of a rank has the secret."""
    mac, _, node = (proof or b"").decode("utf-8", "surrogateescape").partition(" ")
    return _are_equal(mac, _mac(secret, _PROOF, facts, rank, node))


def attest(secret: bytes, facts: Facts) -> bytes:
    """Attest that all members of a round have proved that they have the secret."""
    return _mac(secret, _ATTESTATION, facts).encode()


def is_attested(secret: bytes, facts: Facts, attestation: bytes) -> bool:
    """Whether an attestation, which anyone may have written, is of a node that has the secret."""
    return _are_equal(attestation.decode("utf-8", "surrogateescape"), _mac(secret, _ATTESTATION, facts))


def _mac(secret: bytes, label: str, facts: Facts, *more: int | str) -> str:
    # As JSON, no two lists of fields are the same text.
    return hmac.digest(secret, json.dumps([label, *facts, *more]).encode(), "sha256").hex()


def _are_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
