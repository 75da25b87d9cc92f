"""The members of a round prove to each other that they have the job's join secret, through the round's store."""

from __future__ import annotations

import logging
import stat
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Left
from redelastic.redis.errors import RedelasticError
from redelastic.redis.keys import ATTESTED, PROVED
from redelastic.store import RedisStore, RoundBrokenError
from redelastic.store.exchange import Exchange

from .join_secret import Facts, attest, is_attested, prove, verify
from .node import Node
from .view import Round

log = logging.getLogger(__name__)

MIN_SECRET: Final = 16  # bytes
SAMPLE: Final = 64  # members whose proofs a node looks at to find out whether rank 0 or itself is the stranger
ADVICE: Final = "All nodes of a run need the same --join-secret-file (join_secret_file of --rdzv-conf)"


class JoinSecretError(RendezvousError):
    """This node and the others of its run do not have the same join secret."""


def read_secret(path: str) -> bytes:
    """Read a join secret, without the newline at its end; warn if all users of the host can read it.

    Raises:
        ValueError: the file cannot be read, or holds less than 16 bytes.
    """
    file = Path(path)
    try:
        secret, mode = file.read_bytes().rstrip(b"\r\n"), file.stat().st_mode
    except OSError as e:
        raise ValueError(f"The join secret's file {path!r} cannot be read: {e.strerror or e}.") from e
    if len(secret) < MIN_SECRET:
        raise ValueError(
            f"The join secret in {path!r} has {len(secret)} bytes; at least {MIN_SECRET} are needed. Make one with "
            "`openssl rand -hex 32`, and give all nodes the same file."
        )
    if mode & stat.S_IROTH:
        log.warning("All users of this host can read the join secret in %r: `chmod 600` it.", path)
    return secret


class Admittance:
    """Admits a node to rounds all of whose members have the join secret.

    Each member writes a proof into the round's store. Rank 0 verifies all, and writes one attestation that the others
    verify. Members without the secret are made to leave, and the others regroup. Where it is not clear who the
    strangers are, a node leaves by itself if it is in the minority, unless an earlier round has shown that it has the
    run's secret.

    Args:
        node: of this host.
        control: of its run.
        secret: of the job.
    """

    def __init__(self, node: Node, control: RunControl, secret: bytes) -> None:
        self._node, self._control, self._secret = node, control, secret
        self._timeout = min(node.settings.read_timeout, node.settings.join_timeout)
        self._proved_in = ""  # incarnation of the run in which a round was attested to this node
        self._exchange: Exchange | None = None

    def close(self) -> None:
        """Stop resending the attestation of the last round."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def admit(self, entered: Round, store: RedisStore) -> bool:
        """Prove to the other members of a round that this node has the secret, and have them prove it.

        Rank 0 waits for the others' proofs for ``read_timeout`` or ``join_timeout``, whichever is shorter; the others
        wait twice as long for its attestation.

        Returns:
            Whether all have it; else the round is broken, and this node has to regroup.

        Raises:
            JoinSecretError: this node has left the run, since the others do not have its secret.
            DistNetworkError: Redis could not be reached in time.
        """
        s = self._node.settings
        facts = Facts(
            key_prefix=s.key_prefix,
            run_id=s.run_id,
            incarnation=entered.incarnation,
            epoch=entered.epoch,
            size=entered.size,
            completed_at=entered.completed_at,
            host=entered.host,
            port=entered.port,
        )
        self.close()
        own = store.clone()
        own.set_timeout(timedelta(seconds=self._timeout * (1 if entered.rank == 0 else 2)))
        try:
            admitted = (self._verify_all if entered.rank == 0 else self._await_attestation)(entered, facts, own)
        except RoundBrokenError as e:
            log.warning("%s", e)
            return False
        if admitted:
            self._proved_in = entered.incarnation
        return admitted

    def _verify_all(self, entered: Round, facts: Facts, store: RedisStore) -> bool:
        """As rank 0, verify all members' proofs and attest that; or have the strangers leave."""
        keys = [PROVED.format(facts.completed_at, rank) for rank in range(entered.size)]
        exchange = Exchange(store)
        exchange.set(keys[0], self._prove(facts, 0))
        proofs: Sequence[bytes | None]
        try:
            proofs = exchange.multi_get(keys)
        except (RoundBrokenError, DistNetworkError):
            raise
        except DistStoreError:  # some are missing
            proofs = store.peek(keys)
        strangers = [rank for rank, proof in enumerate(proofs) if not verify(self._secret, facts, rank, proof)]
        if not strangers:
            exchange.set(ATTESTED.format(facts.completed_at), attest(self._secret, facts))
            exchange.keep_resending()
            self._exchange = exchange
            return True
        if 2 * len(strangers) > entered.size and not self._is_known_in(entered):
            self._leave(entered, f"{len(strangers)} of {entered.size} nodes have not proved that they have its secret")
        self._expel(entered, {rank: "another" if proofs[rank] else "no" for rank in strangers})
        return False

    def _await_attestation(self, entered: Round, facts: Facts, store: RedisStore) -> bool:
        """As another rank, prove that this node has the secret and wait for rank 0's attestation."""
        exchange = Exchange(store)
        exchange.set(PROVED.format(facts.completed_at, entered.rank), self._prove(facts, entered.rank))
        try:
            attestation = exchange.get(ATTESTED.format(facts.completed_at))
        except (RoundBrokenError, DistNetworkError):
            raise
        except DistStoreError:
            attestation = b""
        if is_attested(self._secret, facts, attestation):
            return True
        if not self._is_known_in(entered) and not self._is_in_majority(entered, facts, store):
            why = "attested with another secret" if attestation else "attested by nobody"
            self._leave(
                entered, f"its round {entered.epoch} was {why}; rank 0 is node {self._names_in(entered).get(0)}"
            )
        self._expel(entered, {0: "another" if attestation else "no"})
        return False

    def _prove(self, facts: Facts, rank: int) -> bytes:
        return prove(self._secret, facts, rank, self._node.id)

    def _is_known_in(self, entered: Round) -> bool:
        return bool(entered.incarnation) and self._proved_in == entered.incarnation

    def _is_in_majority(self, entered: Round, facts: Facts, store: RedisStore) -> bool:
        """Whether more than half of the members have this node's secret, as far as a sample of them shows."""
        others = [rank for rank in range(1, entered.size) if rank != entered.rank][:SAMPLE]
        proofs = store.peek([PROVED.format(facts.completed_at, rank) for rank in others])
        having = sum(verify(self._secret, facts, rank, proof) for rank, proof in zip(others, proofs, strict=True))
        return 2 * (1 + having) > 2 + len(others)

    def _leave(self, entered: Round, why: str) -> None:
        node = f"Node {self._node.id}, rank {entered.rank} of round {entered.epoch}"
        self._node.try_to_leave(Left(cause="secret", reason=why))
        raise JoinSecretError(f"{node}, left run {self._node.run_id!r}: {why}. {ADVICE}.")

    def _expel(self, entered: Round, strangers: dict[int, str]) -> None:
        """Have members without the secret leave the run, and thereby break the round."""
        names = self._names_in(entered)
        for rank, secret in strangers.items():
            if not (node := names.get(rank)):  # it has left the round meanwhile
                continue
            why = f"rank {rank} of round {entered.epoch} has {secret} join secret"
            log.error("Node %s of run %r has to leave: %s. %s.", node, self._node.run_id, why, ADVICE)
            try:
                self._control.drain(node, f"{why}. {ADVICE}", 0)  # it must not come back
                self._node.expel(node, Left(cause="secret", reason=why))
            except RedelasticError as e:
                log.warning("Node %s could not be made to leave: %s", node, e)

    def _names_in(self, entered: Round) -> dict[int | None, str]:
        """The ids of a round's members by rank, as far as they are still there."""
        try:
            run = self._control.state()
        except RedelasticError:
            return {}
        return {member.rank: member.id for member in run.members} if run.epoch == entered.epoch else {}
