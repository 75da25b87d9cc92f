"""The join secret: its proofs, for any fields; and real nodes that have it, have another, or have none."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import assume, given
from hypothesis import strategies as st

from redelastic.monitoring.events import Left
from redelastic.redis.keys import ATTESTED, PROVED, RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.admittance import JoinSecretError, read_secret
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.join_secret import Facts, attest, is_attested, prove, verify
from redelastic.rendezvous.node import DrainedError
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join_all, ranks, until

LONG = 60.0  # seconds for a busy machine
SOON = 5.0  # read_timeout, in seconds, where a test waits for what a node without a secret does not write

texts = st.text(max_size=20)
numbers = st.integers(0, 2**53)
secrets = st.binary(min_size=16, max_size=40)
facts = st.builds(Facts, texts, texts, texts, numbers, numbers, numbers, texts, numbers)


class TestProofs:
    @given(secrets, facts, numbers, texts)
    def test_a_proof_of_this_node_in_this_round_is_valid(
        self, secret: bytes, known: Facts, rank: int, node: str
    ) -> None:
        assert verify(secret, known, rank, prove(secret, known, rank, node))
        assert is_attested(secret, known, attest(secret, known))

    @given(secrets, facts, numbers, texts, st.data())
    def test_a_proof_is_invalid_in_another_round_or_rank(
        self, secret: bytes, known: Facts, rank: int, node: str, data: st.DataObject
    ) -> None:
        field = data.draw(st.sampled_from(Facts._fields))
        value: Any = data.draw(texts if isinstance(getattr(known, field), str) else numbers)
        other = known._replace(**{field: value})
        assume(other != known)
        assert not verify(secret, other, rank, prove(secret, known, rank, node))
        assert not is_attested(secret, other, attest(secret, known))
        assert not verify(secret, known, rank + 1, prove(secret, known, rank, node))

    @given(secrets, secrets, facts, numbers, texts)
    def test_a_proof_is_invalid_with_another_secret(
        self, secret: bytes, other: bytes, known: Facts, rank: int, node: str
    ) -> None:
        assume(secret.rstrip(b"\0") != other.rstrip(b"\0"))  # HMAC pads a short key with zeros
        assert not verify(other, known, rank, prove(secret, known, rank, node))
        assert not is_attested(other, known, attest(secret, known))

    @given(secrets, facts, numbers, texts, st.binary(max_size=100))
    def test_other_texts_are_no_proofs(
        self, secret: bytes, known: Facts, rank: int, node: str, anything: bytes
    ) -> None:
        proof = prove(secret, known, rank, node)
        for forged in (None, b"", anything, proof + b"x", proof[1:], attest(secret, known)):
            assert not verify(secret, known, rank, forged)
        for forged in (anything, proof, proof.partition(b" ")[0]):
            assert not is_attested(secret, known, forged)


class TestFile:
    def test_a_newline_at_the_end_is_not_part_of_the_secret(self, tmp_path: Path) -> None:
        file = tmp_path / "secret"
        for end in (b"", b"\n", b"\r\n"):
            file.write_bytes(b" 0123456789abcde" + end)
            assert read_secret(str(file)) == b" 0123456789abcde"

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "cannot be read: No such file"),
            (b"", "has 0 bytes; at least 16 are needed. Make one with"),
            (b"\n" * 20, "has 0 bytes"),
            (b"0123456789abcde\n", "has 15 bytes"),
        ],
    )
    def test_a_bad_file_is_refused_with_the_reason(
        self, content: bytes | None, said: str, tmp_path: Path, new_node: NodeFactory
    ) -> None:
        file = tmp_path / "secret"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            new_node(1, 1, join_secret_file=str(file))

    @pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o604, True)])
    def test_a_file_that_others_can_read_gives_a_warning(
        self, mode: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "secret"
        file.write_text("0123456789abcdef")
        file.chmod(mode)
        read_secret(str(file))
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * warns
        assert "0123456789abcdef" not in caplog.text


@dataclass
class Secrets:
    """Makes nodes of the test's run with a secret or another."""

    folder: Path
    make: NodeFactory

    def node(self, secret: str, *sizes: int, **config: Any) -> RedisRendezvousHandler:
        file = self.folder / secret
        file.write_text(f"{secret}, repeated as {secret}\n")
        file.chmod(0o600)
        return self.make(*sizes, join_secret_file=str(file), **config)


@pytest.fixture
def secrets_of(tmp_path: Path, new_node: NodeFactory) -> Secrets:
    return Secrets(tmp_path, new_node)


def cause_of_leaving(node: RedisRendezvousHandler) -> list[tuple[str, str]]:
    return [(event.cause, event.node) for event in events(node, "left") if isinstance(event, Left)]


class TestNodes:
    def test_nodes_with_the_secret_form_rounds(self, secrets_of: Secrets, pool: ThreadPoolExecutor) -> None:
        nodes = [secrets_of.node("ours", 3, 3) for _ in range(3)]
        for _ in range(2):
            infos = join_all(pool, *nodes)
            assert sorted(ranks(infos)) == [0, 1, 2]
        assert cause_of_leaving(nodes[0]) == []

    @pytest.mark.fault("a node without the job's join secret", "it has to leave, and the others go on")
    def test_one_has_another(self, secrets_of: Secrets, pool: ThreadPoolExecutor) -> None:
        """The others go on without it, whichever rank it had, and it does not come back."""
        nodes = [secrets_of.node("ours", 2, 3, last_call_timeout=0) for _ in range(2)]
        join_all(pool, *nodes)
        stranger = secrets_of.node("theirs", 2, 3, last_call_timeout=0)
        refused, id_of_stranger = pool.submit(stranger.next_rendezvous), stranger.node.id
        until(lambda: all(node.num_nodes_waiting() for node in nodes), "the members know of the stranger")
        infos = join_all(pool, *nodes)
        assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]
        said = r"rank 2 of round 2 has another join secret\. All nodes of a run need the same --join-secret-file"
        with pytest.raises(DrainedError, match=said):
            refused.result(LONG)
        assert ("secret", id_of_stranger) in cause_of_leaving(nodes[0])

    def test_rank_0_has_another(self, secrets_of: Secrets, pool: ThreadPoolExecutor) -> None:
        """It is in the minority, and leaves by itself."""
        stranger = secrets_of.node("theirs", 2, 3, topology="a", last_call_timeout=LONG)
        nodes = [secrets_of.node("ours", 2, 3, topology="b", last_call_timeout=LONG) for _ in range(2)]
        refused = pool.submit(stranger.next_rendezvous)
        infos = join_all(pool, *nodes)
        assert [info.world_size for info in infos] == [2, 2]
        with pytest.raises(JoinSecretError, match=r"rank 0 of round 1, left run .*: 2 of 3 nodes have not proved"):
            refused.result(LONG)

    def test_one_has_none(self, secrets_of: Secrets, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [secrets_of.node("ours", 2, 3, last_call_timeout=0, read_timeout=SOON) for _ in range(2)]
        join_all(pool, *nodes)
        stranger = new_node(2, 3, last_call_timeout=0)
        joined = pool.submit(stranger.next_rendezvous)
        until(lambda: all(node.num_nodes_waiting() for node in nodes), "the members know of the stranger")
        infos = join_all(pool, *nodes)
        assert [info.world_size for info in infos] == [2, 2]
        assert joined.result(LONG).rank == 2  # it cannot know, but its workers wait for the others'
        with pytest.raises(DrainedError, match="rank 2 of round 2 has no join secret"):
            stranger.next_rendezvous()

    def test_rank_0_has_none(self, secrets_of: Secrets, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        """The majority has the secret: it makes rank 0 leave."""
        stranger = new_node(2, 3, topology="a", last_call_timeout=LONG)
        config: dict[str, Any] = {"topology": "b", "last_call_timeout": LONG, "read_timeout": SOON}
        nodes = [secrets_of.node("ours", 2, 3, **config) for _ in range(2)]
        joined = pool.submit(stranger.next_rendezvous)
        assert [info.world_size for info in join_all(pool, *nodes)] == [2, 2]
        assert joined.result(LONG).rank == 0
        with pytest.raises(DrainedError, match="rank 0 of round 1 has no join secret"):
            stranger.next_rendezvous()

    def test_a_node_with_a_secret_leaves_a_run_without(
        self, secrets_of: Secrets, new_node: NodeFactory, pool: ThreadPoolExecutor
    ) -> None:
        nodes = [new_node(2, 3, last_call_timeout=0) for _ in range(2)]
        join_all(pool, *nodes)
        stranger = secrets_of.node("theirs", 2, 3, last_call_timeout=0, read_timeout=SOON)
        refused = pool.submit(stranger.next_rendezvous)
        until(lambda: all(node.num_nodes_waiting() for node in nodes), "the members know of the stranger")
        join_all(pool, *nodes)
        with pytest.raises(JoinSecretError, match="its round 2 was attested by nobody; rank 0 is node "):
            refused.result(LONG)
        until(lambda: all(node.num_nodes_waiting() for node in nodes), "the others regroup")
        assert [info.world_size for info in join_all(pool, *nodes)] == [2, 2]

    def test_a_node_that_formed_the_run_keeps_out_more_strangers(
        self, secrets_of: Secrets, pool: ThreadPoolExecutor
    ) -> None:
        first = secrets_of.node("ours", 1, 3, last_call_timeout=0)
        first.next_rendezvous()
        strangers = [secrets_of.node("theirs", 1, 3, last_call_timeout=0) for _ in range(2)]
        refused = [pool.submit(stranger.next_rendezvous) for stranger in strangers]
        while not all(future.done() for future in refused):
            until(
                lambda: first.num_nodes_waiting() or all(future.done() for future in refused),
                "a stranger waits, or all are refused",
            )
            assert first.next_rendezvous().rank == 0
        assert [type(future.exception()) for future in refused] == [DrainedError] * 2


@pytest.mark.parametrize("lost", [{"keep": 0}, {"lose_request": True}], ids=["reply", "request"])
@pytest.mark.parametrize("what", [b"redelastic/proved/", b"redelastic/attested"], ids=["proof", "attestation"])
def test_a_lost_message_is_sent_again(
    what: bytes, lost: dict[str, Any], secrets_of: Secrets, pool: ThreadPoolExecutor, server: RedisServer
) -> None:
    host, _, port = server.endpoint.partition(":")
    with FaultyProxy(host, int(port)) as proxy:
        url = server.url.replace(server.endpoint, f"127.0.0.1:{proxy.port}")
        nodes = [secrets_of.node("ours", 2, 2, url=url) for _ in range(2)]
        fault = proxy.add(Fault(what, **lost))
        assert sorted(ranks(join_all(pool, *nodes))) == [0, 1]
        assert fault.fired.is_set()
        assert cause_of_leaving(nodes[0]) == []
        for node in nodes:
            node.shutdown()


class TestReplay:
    def test_a_proof_of_an_earlier_epoch_is_refused(
        self, secrets_of: Secrets, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        """A stranger takes the place of a member, and repeats the proof of that member."""
        nodes = [secrets_of.node("ours", 1, 2, last_call_timeout=LONG) for _ in range(2)]
        by_rank = dict(zip(ranks(join_all(pool, *nodes)), nodes, strict=True))
        proofs = client.hgetall(keys.store(1).data)
        completed_at = int(client.hget(keys.run, "completed_at") or 0)
        shown: Any = proofs[PROVED.format(completed_at, 1).encode()]
        assert ATTESTED.format(completed_at).encode() in proofs
        by_rank[1].end(Left(cause="drained"), "goes on")
        stranger = new_node(1, 2)
        joined = pool.submit(stranger.next_rendezvous)
        until(lambda: client.zcard(keys.candidates) == 1, "the stranger waits")
        regrouped = pool.submit(by_rank[0].next_rendezvous)
        store = joined.result(LONG).store
        completed_at = int(client.hget(keys.run, "completed_at") or 0)
        store.set(PROVED.format(completed_at, 1), shown)
        assert regrouped.result(LONG).world_size == 1
        with pytest.raises(DrainedError, match="rank 1 of round 2 has another join secret"):
            stranger.next_rendezvous()
