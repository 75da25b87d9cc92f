"""Endpoints and URLs: every form, every wrong form, and no secret in anything printed."""

from __future__ import annotations

import logging
import pickle
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from redis.cluster import RedisCluster
from redis.sentinel import SentinelConnectionPool

from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import SCHEMES, URL_VARIABLE, Endpoint, parse_endpoint
from redelastic.rendezvous.settings import Settings, parameters_from_url
from tests.support import servers

SECRET = "hünter2/?#@:% x"  # every sign that means something in a URL
ENCODED = quote(SECRET, safe="")


@pytest.fixture(autouse=True)
def no_environment_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Endpoint("redis", (("localhost", 6379),))),
        ("  ", Endpoint("redis", (("localhost", 6379),))),
        ("node1", Endpoint("redis", (("node1", 6379),))),
        ("node1:7000", Endpoint("redis", (("node1", 7000),))),
        (" node1:7000\n", Endpoint("redis", (("node1", 7000),))),
        ("node_1.my-cluster.example.:7000", Endpoint("redis", (("node_1.my-cluster.example.", 7000),))),
        ("10.0.0.1:65535", Endpoint("redis", (("10.0.0.1", 65535),))),
        ("[::1]", Endpoint("redis", (("::1", 6379),))),
        ("[fe80::1%eth0]:7000", Endpoint("redis", (("fe80::1%eth0", 7000),))),
        ("redis://h", Endpoint("redis", (("h", 6379),))),
        ("redis://h/", Endpoint("redis", (("h", 6379),))),
        ("redis://h:1/3", Endpoint("redis", (("h", 1),), db=3)),
        ("redis://h:1?db=3", Endpoint("redis", (("h", 1),), db=3)),
        ("redis://[2001:db8::7]:1/3", Endpoint("redis", (("2001:db8::7", 1),), db=3)),
        ("redis://user@h", Endpoint("redis", (("h", 6379),), username="user")),
        ("redis://:pass@h", Endpoint("redis", (("h", 6379),), password="pass")),
        ("redis://user:pass@h", Endpoint("redis", (("h", 6379),), username="user", password="pass")),
        ("redis://user:p@ss:w@h", Endpoint("redis", (("h", 6379),), username="user", password="p@ss:w")),
        ("redis://user:a+b%2Bc@h", Endpoint("redis", (("h", 6379),), username="user", password="a+b+c")),
        (f"redis://{ENCODED}:{ENCODED}@h", Endpoint("redis", (("h", 6379),), username=SECRET, password=SECRET)),
        ("rediss://user:pass@h:1/2", Endpoint("rediss", (("h", 1),), db=2, username="user", password="pass")),
        ("unix:///run/redis.sock", Endpoint("unix", path="/run/redis.sock")),
        ("unix:///run/a%20b@c.sock?db=2", Endpoint("unix", path="/run/a b@c.sock", db=2)),
        ("unix://u:p@/run/redis.sock", Endpoint("unix", path="/run/redis.sock", username="u", password="p")),
        ("redis+sentinel://h/m", Endpoint("redis+sentinel", (("h", 6379),), service="m")),
        (
            f"rediss+sentinel://u:p@a:1,[::1]:2,c/m/4?sentinel_username=su&sentinel_password={ENCODED}",
            Endpoint(
                "rediss+sentinel",
                (("a", 1), ("::1", 2), ("c", 6379)),
                service="m",
                db=4,
                username="u",
                password="p",
                sentinel_username="su",
                sentinel_password=SECRET,
            ),
        ),
        ("redis+cluster://u:p@a:1,b:2", Endpoint("redis+cluster", (("a", 1), ("b", 2)), username="u", password="p")),
        ("rediss+cluster://a", Endpoint("rediss+cluster", (("a", 6379),))),
    ],
)
def test_every_form_is_read(text: str, expected: Endpoint) -> None:
    assert parse_endpoint(text) == expected


WRONG = [
    ("::1", "IPv6 in brackets"),
    ("node1:", "no valid host and port"),
    ("node1:0", "1 to 65535"),
    ("node1:65536", "1 to 65535"),
    ("node1:x", "'node1:…'"),
    (":6379", "no valid host"),
    ("a b", "'a b'"),
    ("a..b:1", "'a..b:1'"),
    ("x" * 64 + ".example", "no valid host"),
    ("[::zz]:1", "'…'"),
    ("[1.2.3.4]", "IPv6 in brackets"),
    ("h:1/0", "'h:1/0'"),
    ("h\x00:1", "no valid host"),
    ("h\ud800", "no valid host"),
    ("http://h", "scheme 'http' is unknown"),
    ("etcd://h", "redis+cluster://"),
    ("REDIS://h", "scheme 'REDIS' is unknown"),
    ("://h", "has no scheme"),
    ("redis://", "no valid host"),
    ("redis://:6379", "no valid host"),
    ("redis:///0", "no valid host"),
    ("redis://h:1:2", "'redis://h:…'"),
    ("redis://h:65535,i:65536", "'redis://h:65535,i:…'"),
    ("redis://[::1]:x", "'redis://[::1]:…'"),
    ("redis://h/x", "'x'"),
    ("redis://h/-1", "'-1'"),
    ("redis://h/٣", "is not a whole number"),
    ("redis://h/1/2", "that this form does not take"),
    ("redis://h/1?db=2", "twice"),
    ("redis://h?db=1&db=2", "repeats one of the options"),
    ("redis://h?ssl=true", "'ssl'"),
    ("redis://a,b", "redis+sentinel://"),
    ("redis://a,b", "redis+cluster://"),
    ("redis://h#x", "%23"),
    ("redis://%ff@h", "not UTF-8"),
    ("redis://u:%ff@h", "not UTF-8"),
    ("redis://u:\udcff@h", "not UTF-8"),
    ("unix://", "unix://[user:password@]/path"),
    ("unix://run/redis.sock", "names no socket"),
    ("unix:///run/%ff", "not UTF-8"),
    ("unix:///s?db=x", "'x'"),
    ("redis+sentinel://h", "lacks the master's name"),
    ("redis+sentinel://h/m/0/x", "that this form does not take"),
    ("redis+sentinel://h/m?password=x", "'password'"),
    ("redis+sentinel://h/m?sentinel_password=%ff", "not UTF-8"),
    ("redis+cluster://h/1", "that this form does not take"),
    ("redis+cluster://h/m", "'m'"),
    ("redis+cluster://a,,b", "no valid host"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_every_wrong_form_is_refused_with_what_and_what_to_do(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"endpoint|URL|option") as refused:
        parse_endpoint(text)
    assert type(refused.value) is ValueError
    assert says in str(refused.value)
    str(refused.value).encode()  # can be printed


# Each has a part of a secret where a parser may take it for something else, and quote it.
LEAKY = [
    "redis://u:hunter2",
    "u:hunter2",
    "redis://default:hunter2host:6379",
    "redis://u:hunter2/0",
    "redis://u:hunter2?x=1",
    "redis://:hunter2",
    "redis://[hunter2",
    "redis+sentinel://h:1,u:hunter2/m",
    "redis://h:1:hunter2",
    "redis://u:hunter2@h:x",
    "redis://u:hunter2@h/hmm",
    "redis://u:hunter2@a,b",
    "redis://u:hunter2@h?what=1",
    "redis://u:hunter2/x@h",
    "redis://u:hunter2?x@h",
    "redis://u:hunter2#x@h",
    "redis://u:x/hunter2@h",
    "redis://u:x?hunter2@h",
    "redis://u:x#hunter2@h",
    "redis://u:x@y/hunter2@h",
    "redis://u:[hunter2@h:1]",
    "redis://u:[hunter2]@h:x",
    "redis://u:hunter2\u2100@h:x",
    "redis://u:%68unter2@h:x",
    "redis://u:hunter2%ff@h",
    "redis://u:hunter2\udcff@h",
    "http://u:hunter2@h",
    "u:hunter2@h:x",
    "u:hunter2@h",
    "u:hunter2@redis://h",
    "hunter2@redis://h",
    "rediss://u:hunter2@h:x",
    "unix://u:hunter2/x@/run/redis.sock",
    "unix://u:x@hunter2/x@/run/redis.sock",
    "unix://u:hunter2@run/redis.sock",
    "unix://u:hunter2@/run/redis.sock?db=x",
    "redis+sentinel://u:hunter2@h",
    "redis+sentinel://u:p@h:x/m?sentinel_password=hunter2",
    "redis+sentinel://u:p@h/m?sentinel_password=hunter2%ff",
    "redis+sentinel://u:p@h/m?sentinel_password=a@hunter2",
    "redis+sentinel://u:p@h/m?sentinel_password=a#hunter2",
    "redis+sentinel://h/m?sentinel_password=hunter2&sentinel_password=hunter2",
    "redis+sentinel://h/m&sentinel_password=hunter2",
    "redis+sentinel://h&sentinel_password=hunter2/m",
    "redis://h/0&password=hunter2",
    "redis+cluster://u:hunter2@h/7",
]


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize("text", LEAKY)
@pytest.mark.parametrize("source", ["argument", "environment", "url with parameters"])
def test_no_error_shows_a_password(text: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> Endpoint:
        if source == "argument":
            return parse_endpoint(text)
        if source == "environment":
            monkeypatch.setenv(URL_VARIABLE, text)
            return parse_endpoint("")
        sign = "&" if "?" in text else "?"
        params = parameters_from_url(f"{text}{sign}run_id=r&min_nodes=1&max_nodes=1")
        return parse_endpoint(params.endpoint)

    with pytest.raises(ValueError, match=r"endpoint|URL|option") as refused:
        read()
    # the traceback quotes source lines, never values; the text of the whole chain is in it
    assert "unter2" not in printed(refused.value)
    assert "hunter2" not in str(refused.value.args)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_endpoint_prints_itself_without_its_secrets(scheme: str) -> None:
    rest = {"unix": "/run/s", "redis+sentinel": "h:1/m", "rediss+sentinel": "h:1/m"}.get(scheme, "h:1")
    query = f"?sentinel_password={ENCODED}&sentinel_username=hunter" if scheme.endswith("sentinel") else ""
    endpoint = parse_endpoint(f"{scheme}://hunter:{ENCODED}@{rest}{query}")
    for shown in (str(endpoint), repr(endpoint), f"{endpoint}"):
        assert "nter" not in shown
    assert str(endpoint) == f"{scheme}://{rest}"
    assert parse_endpoint(str(endpoint)).hosts == endpoint.hosts
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint  # noqa: S301


@pytest.mark.parametrize("text", ["redis://[::1]:1/2", "unix:///run/s?db=3", "redis+sentinel://a:1,b:2/m/4"])
def test_what_an_endpoint_prints_can_be_read_again(text: str) -> None:
    assert str(parse_endpoint(text)) == text


@pytest.mark.parametrize(
    ("environment", "text", "expected"),
    [
        ("redis://u:p@a:1/2", "", Endpoint("redis", (("a", 1),), db=2, username="u", password="p")),
        ("redis://u:p@a:1/2", "b", Endpoint("redis", (("b", 6379),), db=2, username="u", password="p")),
        ("rediss://u:p@a:1/2", "b:3", Endpoint("rediss", (("b", 3),), db=2, username="u", password="p")),
        ("redis://u:p@a:1/2", "redis://b:3", Endpoint("redis", (("b", 3),))),
        ("a:1", "", Endpoint("redis", (("a", 1),))),
        ("a", "b:3", Endpoint("redis", (("b", 3),))),
        ("unix://u:p@/s", "b:3", Endpoint("redis", (("b", 3),), username="u", password="p")),
        ("redis+cluster://u:p@a", "b:3", Endpoint("redis", (("b", 3),), username="u", password="p")),
        ("rediss+sentinel://u:p@a/m", "b:3", Endpoint("rediss", (("b", 3),), username="u", password="p")),
        (
            "redis+sentinel://u:p@a/m",
            "",
            Endpoint("redis+sentinel", (("a", 6379),), service="m", username="u", password="p"),
        ),
        ("  ", "", Endpoint("redis", (("localhost", 6379),))),
        (" redis://a \n", "", Endpoint("redis", (("a", 6379),))),
    ],
)
def test_the_environment_fills_in_what_a_plain_host_lacks(
    environment: str, text: str, expected: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, environment)
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", "h:1"])
@pytest.mark.parametrize("environment", ["localhost:x", "u:p@localhost", "http://h", "redis://h:x"])
def test_a_wrong_environment_is_named(environment: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, environment)
    with pytest.raises(ValueError, match=f"environment variable {URL_VARIABLE} is invalid"):
        parse_endpoint(text)


def test_a_wrong_environment_does_not_matter_to_a_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "http://nonsense")
    assert parse_endpoint("redis://h:1").hosts == (("h", 1),)


def test_files_for_tls_are_checked(tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    pem.touch()
    endpoint = parse_endpoint("rediss://h", ca_cert=str(pem), ssl_cert=str(pem), ssl_cert_key=str(pem))
    assert (endpoint.ca_cert, endpoint.ssl_cert, endpoint.ssl_cert_key) == (str(pem),) * 3
    with pytest.raises(ValueError, match=r"need TLS, but the endpoint is redis://h:6379: use rediss://"):
        parse_endpoint("redis://u:p@h", ca_cert=str(pem))
    for wrong in (str(tmp_path), str(tmp_path / "none.pem")):
        with pytest.raises(ValueError, match=f"ca_cert='{wrong}' is not a readable file: give the path"):
            parse_endpoint("rediss://h", ca_cert=wrong)
    with pytest.raises(ValueError, match="needs its certificate: give ssl_cert too"):
        parse_endpoint("rediss://h", ssl_cert_key=str(pem))


def test_a_client_gets_every_part() -> None:
    client = parse_endpoint(f"redis://user:{ENCODED}@h:7/3").open(2.5)
    assert isinstance(client, redis.Redis)
    options = client.get_connection_kwargs()
    expected = {"host": "h", "port": 7, "db": 3, "username": "user", "password": SECRET}
    expected |= {"socket_timeout": 2.5, "socket_connect_timeout": 2.5}
    assert {name: options[name] for name in expected} == expected
    socket_file = parse_endpoint("unix://:p@/run/s?db=2").open(1).get_connection_kwargs()
    assert (socket_file["path"], socket_file["password"], socket_file["db"]) == ("/run/s", "p", 2)


@pytest.mark.parametrize(("attempt", "each"), [(6, 2), (0.5, 0.5), (2, 1)])
def test_silent_sentinels_together_take_an_attempt(attempt: float, each: float) -> None:
    """They are asked one after the other: of three, two that are silent would outlast a lease."""
    client = parse_endpoint("redis+sentinel://a,b,c/master").open(attempt)
    assert isinstance(client, redis.Redis)
    assert isinstance(client.connection_pool, SentinelConnectionPool)
    for sentinel in client.connection_pool.sentinel_manager.sentinels:
        options = sentinel.get_connection_kwargs()
        assert options["socket_timeout"] == options["socket_connect_timeout"] == each
    assert client.get_connection_kwargs()["socket_timeout"] == attempt


def test_no_refused_login_shows_the_password(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does anything that the failure leaves behind: message, chain, log, repr."""
    caplog.set_level(logging.DEBUG)
    with servers.redis_server("right") as server, server.get_client() as admin:
        admin.acl_setuser("hunter", enabled=True, passwords=["+" + SECRET], categories=["+@all"], keys=["*"])
        for login in ("hunter:hunter2", f":{quote('hunter2/', safe='')}", f"hunter:{ENCODED}x"):
            with pytest.raises(Exception, match="refused the login") as refused:
                Connection.open(f"redis://{login}@{server.endpoint}")
            text = printed(refused.value) + caplog.text
            assert "unter2" not in text.replace("hünter2", "hunter2")
            assert "nter2" not in text
            assert ENCODED not in text
        accepted = Connection.open(f"redis://hunter:{ENCODED}@{server.endpoint}")
        assert accepted.call(lambda client: client.execute_command("ACL WHOAMI")) == "hunter"
        settings = Settings.from_parameters(
            parameters_from_url(f"redis://hunter:{ENCODED}@{server.endpoint}?run_id=r&min_nodes=1&max_nodes=1")
        )
        for shown in (repr(accepted), accepted.name, repr(accepted.client), repr(settings), caplog.text):
            assert "nter2" not in shown
        accepted.close()


def test_a_cluster_client_hides_it_too() -> None:
    with servers.one_node_of_a_cluster("right") as server, server.get_client() as admin:
        admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        servers.wait_until(
            lambda: admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "one node is a Cluster"
        )
        opened = Connection.open(f"redis+cluster://:right@{server.endpoint}")
        assert isinstance(opened.client, RedisCluster)
        assert "right" not in repr(opened) + opened.name
        opened.close()
        own = RedisCluster(
            startup_nodes=[redis.cluster.ClusterNode("127.0.0.1", servers.port_of(server))], password="right"
        )
        assert "right" not in Connection(own).name
        own.close()
