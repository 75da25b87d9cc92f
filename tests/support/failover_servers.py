"""A pytest plugin: servers with replicas for many tests. After each test, its fixture repairs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import redis

from tests.support import servers
from tests.support.long_tests import quick_first
from tests.support.servers import HOST, MASTER_NAME, SentinelGroup, Shard, port_of, wait_until

TILT: Final = 30.0  # how long a sentinel that was not scheduled for two seconds judges no server, in seconds


@pytest.fixture(scope="session")
def replicated_cluster() -> Iterator[servers.Cluster]:
    with servers.redis_cluster(replicas=True) as started:
        yield started


@pytest.fixture(scope="session")
def sentinels() -> Iterator[SentinelGroup]:
    with servers.sentinel_group() as group:
        yield group


@pytest.fixture
def in_cluster(replicated_cluster: servers.Cluster, run_id: str) -> Iterator[Shard]:
    """The servers of this run's slot in a Cluster: a master and a replica."""
    shard = replicated_cluster.shard(f"{{{run_id}}}")
    yield shard
    shard.heal()


@pytest.fixture
def with_sentinel(sentinels: SentinelGroup) -> Iterator[Shard]:
    """A master and two replicas that sentinels watch."""
    shard = Shard(sentinels.url, sentinels.servers)
    yield shard
    shard.heal()
    wait_until(lambda: sentinels_agree(sentinels), "the sentinels know who is who", TILT + 30)


def sentinels_agree(group: SentinelGroup) -> bool:
    """Whether every sentinel names the current master and finds all servers up."""

    def sees_all(port: int) -> bool:
        with redis.Redis(HOST, port, password=group.sentinel_password) as sentinel:
            master_state: Any = sentinel.sentinel_master(MASTER_NAME)
            replicas: Any = sentinel.sentinel_slaves(MASTER_NAME)
        up = [state["flags"] for state in (master_state, *replicas)]
        return (master_state["port"], up) == (port_of(group.master()), ["master", "slave", "slave"])

    master = Shard(group.url, group.servers).master()
    return master is group.master() and all(map(sees_all, group.sentinel_ports))


@pytest.fixture(params=quick_first(["with_sentinel", "in_cluster"]))
def shard(request: pytest.FixtureRequest) -> Shard:
    """Each kind of server that fails over; all but the first kind are long."""
    found: Shard = request.getfixturevalue(request.param)
    return found
