"""A whole rendezvous, store operations and closing over TLS, unix sockets, ACL users, Sentinel and a Cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from redis.cluster import RedisCluster
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from redelastic import RedisRendezvousBackend, RedisStore
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.errors import ACL_RULES, UnavailableError, UnreachableError
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.lifecycle import live_through_a_run, make_node, nodes, rendezvous, use_store
from tests.support.tls_files import Certificates, encrypt_key, make_certificates
from tests.support.tls_servers import WHO_SPEAKS_TLS, tls_server

# -- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", params=WHO_SPEAKS_TLS)
def tls_url(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[str]:
    with tls_server(request.param, "tls-password", certificates, ask_clients=False) as (_, url):
        yield url


@pytest.fixture(scope="module", params=WHO_SPEAKS_TLS)
def strict_tls_url(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[str]:
    with tls_server(request.param, "tls-password", certificates, ask_clients=True) as (_, url):
        yield url


def test_a_run_over_tls_with_a_ca_of_ones_own(tls_url: str, certificates: Certificates, run_id: str) -> None:
    live_through_a_run(tls_url, run_id, 2, ca_cert=certificates.ca)


def test_a_run_over_tls_with_client_certificates(strict_tls_url: str, certificates: Certificates, run_id: str) -> None:
    files = {"ca_cert": certificates.ca, "ssl_cert": certificates.client, "ssl_cert_key": certificates.client_key}
    live_through_a_run(strict_tls_url, run_id, 2, **files)


def refused(url: str, says: str, **files: str) -> None:
    with pytest.raises(UnavailableError, match=r"^TLS with Redis at rediss://.* failed: .* Check that") as raised:
        Connection.open(parse_endpoint(url, **files), connect_timeout=60)
    assert not isinstance(raised.value, UnreachableError)  # so it was not tried again
    assert says in str(raised.value)
    assert "tls-password" not in str(raised.value)


def test_a_server_of_another_ca_is_refused(tls_url: str, certificates: Certificates) -> None:
    refused(tls_url, "self-signed certificate in certificate chain", ca_cert=certificates.other_ca)
    refused(tls_url, "ca_cert is its CA's file")


def test_a_server_of_another_name_is_refused(tls_url: str, certificates: Certificates) -> None:
    refused(tls_url.replace("127.0.0.1", "localhost"), "not valid for 'localhost'", ca_cert=certificates.ca)


def test_a_client_without_a_certificate_is_refused(strict_tls_url: str, certificates: Certificates) -> None:
    refused(strict_tls_url, "ssl_cert", ca_cert=certificates.ca)


def test_files_that_do_not_fit_are_refused(tls_url: str, certificates: Certificates, tmp_path: Path) -> None:
    c = certificates
    refused(tls_url, "KEY_VALUES_MISMATCH", ca_cert=c.ca, ssl_cert=c.client, ssl_cert_key=c.server_key)
    refused(tls_url, "ssl_cert", ca_cert=c.ca, ssl_cert=c.client)  # which lacks the key
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no PEM")
    refused(tls_url, "ca_cert", ca_cert=str(nonsense))


def test_an_encrypted_key_is_refused_and_nobody_is_asked(
    tls_url: str, certificates: Certificates, tmp_path: Path
) -> None:
    encrypted = tmp_path / "encrypted.key"
    encrypt_key(certificates.client_key, str(encrypted))
    refused(tls_url, "ssl_cert_key", ca_cert=certificates.ca, ssl_cert=certificates.client, ssl_cert_key=str(encrypted))


def test_a_server_without_tls_and_a_client_without_it_say_what_to_try(tls_url: str, server: RedisServer) -> None:
    for url in (tls_url.replace("rediss:", "redis:"), server.url.replace("redis:", "rediss:")):
        with pytest.raises(UnreachableError, match=r"both sides or neither use TLS \(rediss://\)"):
            Connection.open(url, attempt_timeout=0.5, connect_timeout=0.5)


# -- A unix socket


def test_a_run_over_a_unix_socket(run_id: str) -> None:
    with RedisServer(unix_socket=True) as server:
        live_through_a_run(server.url, run_id, 2)


# -- ACL


def allow(admin: redis.Redis, user: str, password: str, rules: str) -> None:
    admin.execute_command("ACL SETUSER", user, "reset", "on", f">{password}", *rules.split())


def rules_for(run_id: str, prefix: str = "redelastic") -> str:
    return ACL_RULES.replace("<key_prefix>", prefix).replace("<run_id>", run_id)


@pytest.mark.parametrize(
    "rules", [ACL_RULES, "~<key_prefix>:{<run_id>}:* +@all -@dangerous", "~<key_prefix>:* +@all -@dangerous"]
)
def test_a_user_of_one_run_lives_its_whole_life(every_server: RedisServer, run_id: str, rules: str) -> None:
    rules = rules.replace("<key_prefix>", "redelastic").replace("<run_id>", run_id)
    with every_server.get_client() as admin:
        allow(admin, run_id, "run-password", rules)
        live_through_a_run(f"redis://{run_id}:run-password@{every_server.endpoint}", run_id, 3)


def test_another_run_is_refused_with_what_to_do(every_server: RedisServer, run_id: str) -> None:
    other = f"{run_id}-other"
    url = f"redis://{run_id}:run-password@{every_server.endpoint}"
    with every_server.get_client() as admin:
        allow(admin, run_id, "run-password", rules_for(run_id))
        node = make_node(url, other, 1, 1)
        connection = Connection.open(url)
        backend, store = RedisRendezvousBackend(connection, other), RedisStore(connection, other)
        calls: list[tuple[type[Exception], Callable[[], object]]] = [
            (RendezvousConnectionError, node.next_rendezvous),
            (RendezvousConnectionError, node.set_closed),
            (RendezvousConnectionError, node.is_closed),
            (RendezvousConnectionError, backend.get_state),
            (RendezvousConnectionError, lambda: backend.set_state(b"x")),
            (DistNetworkError, lambda: store.set("k", "v")),
            (DistNetworkError, lambda: store.get("k")),
        ]
        for kind, call in calls:
            with pytest.raises(kind, match=r"denies this user a key or command") as raised:
                call()
            assert "Check that the user is for this run id and key_prefix" in str(raised.value)
            assert ACL_RULES in str(raised.value)
        assert node.shutdown() is False
        assert not admin.keys(f"*{other}*")
        connection.close()


def test_a_command_that_is_not_allowed_is_named(server: RedisServer, run_id: str) -> None:
    with server.get_client() as admin:
        allow(admin, run_id, "run-password", rules_for(run_id) + " -evalsha")
        node = make_node(f"redis://{run_id}:run-password@{server.endpoint}", run_id, 1, 1)
        with pytest.raises(RendezvousConnectionError, match=r"denies this user .*'evalsha'.*needs the rules"):
            node.next_rendezvous()
        allow(admin, run_id, "run-password", rules_for(run_id) + " -hset")
        with pytest.raises(
            RendezvousConnectionError, match=r"denies this user a key or command: .*script.*needs the rules"
        ):
            node.next_rendezvous()
        node.shutdown()


# -- Sentinel


@pytest.fixture(scope="module")
def sentinels() -> Iterator[servers.SentinelGroup]:
    with servers.sentinel_group() as group:
        yield group


def test_sentinels_that_do_not_know_the_master(sentinels: servers.SentinelGroup) -> None:
    wrong = sentinels.url.replace(f"/{servers.MASTER_NAME}", "/unknown")
    with pytest.raises(UnreachableError, match=r"named no master within .*No master found for 'unknown'.*of that name"):
        Connection.open(wrong, connect_timeout=0.5)


def test_sentinels_that_refuse_the_login(sentinels: servers.SentinelGroup) -> None:
    for wrong in ("?sentinel_password=wrong", ""):
        url = sentinels.url.replace(f"?sentinel_password={sentinels.sentinel_password}", wrong)
        with pytest.raises(UnavailableError, match=r"sentinels of .* refused the login.*sentinel_password=") as raised:
            Connection.open(url, connect_timeout=60)
        assert "redis.client" not in str(raised.value)
        assert sentinels.password not in str(raised.value)


def test_a_master_that_refuses_the_login(sentinels: servers.SentinelGroup) -> None:
    with pytest.raises(UnavailableError, match=r"refused the login: invalid username-password pair"):
        Connection.open(sentinels.url.replace(sentinels.password, "wrong"), connect_timeout=60)


def test_a_sentinel_taken_for_a_server(sentinels: servers.SentinelGroup) -> None:
    connection = Connection.open(f"redis://:{sentinels.sentinel_password}@127.0.0.1:{sentinels.sentinel_ports[0]}")
    with pytest.raises(RendezvousConnectionError, match=r"If it is a sentinel, use redis\+sentinel://"):
        RedisRendezvousBackend(connection, "run").get_state()
    connection.close()


def test_a_run_goes_on_after_a_fail_over(sentinels: servers.SentinelGroup, run_id: str) -> None:
    """The same handlers, with the round's record at the replica that was promoted."""
    live_through_a_run(sentinels.url, f"{run_id}-before", 3)
    with nodes(sentinels.url, run_id, 3) as members:
        before = rendezvous(members)
        before[0].store.set("k", "v")
        with sentinels.master().get_client() as master:
            assert master.wait(2, 5000) == 2  # both replicas have what was written
        epochs = {node.node.view.round.epoch for node in members if node.node.view.round}
        sentinels.fail_over()
        assert before[1].store.get("k") == b"v"
        assert [node.num_nodes_waiting() for node in members] == [0, 0, 0]  # I9: nobody is evicted
        after = rendezvous(members)
        assert {node.node.view.round.epoch for node in members if node.node.view.round} == {max(epochs) + 1}
        one, other = after[0].store, after[1].store
        assert isinstance(one, RedisStore)
        assert isinstance(other, RedisStore)
        use_store(one, other)


# -- Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[servers.Cluster]:
    with servers.redis_cluster() as started:
        yield started


def test_runs_in_every_part_of_a_cluster(cluster: servers.Cluster, run_id: str) -> None:
    """All keys of a run are in one slot, and two runs may be in two."""
    runs: dict[str, str] = {}
    for i in range(100):
        name = f"{run_id}-{i}"
        runs.setdefault(cluster.owner(RunKeys(name).run).endpoint, name)
    assert len(runs) == 3
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(live_through_a_run, cluster.url, name, 4) for name in runs.values()]:
            done.result(60)
    for server in cluster.servers:
        with server.get_client() as client:
            found = [key.decode() for key in client.keys(f"redelastic:{{{run_id}*") if isinstance(key, bytes)]
        assert found
        assert all(key.startswith(RunKeys(runs[server.endpoint]).run.removesuffix("run")) for key in found)


def test_a_user_of_one_run_on_a_cluster(cluster: servers.Cluster, run_id: str) -> None:
    for server in cluster.servers:
        with server.get_client() as admin:
            allow(admin, run_id, "run-password", rules_for(run_id) + " +cluster|slots +command")
    live_through_a_run(cluster.url.replace(f":{cluster.password}@", f"{run_id}:run-password@"), run_id, 2)


def test_a_node_of_a_cluster_taken_for_a_server(cluster: servers.Cluster, run_id: str) -> None:
    owner = cluster.owner(RunKeys(run_id).run)
    for server in cluster.servers:
        connection = Connection.open(server.url)
        backend = RedisRendezvousBackend(connection, run_id)
        if server is owner:
            assert backend.get_state() is None
        else:
            with pytest.raises(RendezvousConnectionError, match=r"is a Cluster node.*Use redis\+cluster://"):
                backend.get_state()
        connection.close()


def test_a_cluster_that_refuses_the_login(cluster: servers.Cluster) -> None:
    with pytest.raises(UnavailableError, match=r"refused the login"):
        Connection.open(cluster.url.replace(cluster.password, "wrong"), connect_timeout=60)


def test_a_clusters_other_nodes_serve_when_the_first_is_not_there(cluster: servers.Cluster, run_id: str) -> None:
    with servers.reserved_port() as nobody:
        url = cluster.url.replace("@", f"@127.0.0.1:{nobody},")
        connection = Connection.open(url)
        assert RedisRendezvousBackend(connection, run_id).get_state() is None
        connection.close()


def test_the_cluster_client_sends_nothing_twice(cluster: servers.Cluster, run_id: str) -> None:
    connection = Connection.open(cluster.url, attempt_timeout=0.5)
    assert isinstance(connection.client, RedisCluster)
    assert connection.call(lambda client: client.incr(run_id)) == 1
    with servers.frozen(cluster.owner(run_id)), pytest.raises(UnreachableError):
        connection.call(lambda client: client.incr(run_id), 0)
    assert connection.call(lambda client: int(client.get(run_id) or 0)) == 2
    connection.close()


def test_a_cluster_with_a_part_away_is_waited_for(cluster: servers.Cluster, run_id: str) -> None:
    connection = Connection.open(cluster.url, attempt_timeout=0.5)
    owner = cluster.owner(RunKeys(run_id).run)
    backend = RedisRendezvousBackend(connection, run_id)
    with ThreadPoolExecutor(1) as pool:
        with servers.frozen(owner):
            with pytest.raises(UnreachableError, match="could not be reached"):
                connection.call(lambda client: client.get(RunKeys(run_id).run), 0.5)
            waiting = pool.submit(backend.set_state, b"state")
        result = waiting.result(30)
        assert result is not None
        assert result[2] is True
    connection.close()
