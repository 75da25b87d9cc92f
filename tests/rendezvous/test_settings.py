"""Settings: wrong values are refused, naming the parameter, the value and what is allowed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from redelastic.redis.endpoint import SCHEMES, Endpoint
from redelastic.redis.keys import RunKeys, check_key_part
from redelastic.rendezvous.settings import Settings, parameters_from_url

SECONDS = (
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "replacement_timeout",
    "keep_alive_interval",
    "ttl",
)
MAY_BE_ZERO = ("last_call_timeout", "replacement_timeout")


def settings(
    run_id: Any = "run", min_nodes: Any = 1, max_nodes: Any = 4, local_addr: Any = None, **config: Any
) -> Settings:
    return Settings.from_parameters(
        RendezvousParameters("redis", "h", run_id, min_nodes, max_nodes, local_addr, **config)
    )


def test_without_parameters_the_defaults_are_torchs() -> None:
    made = settings()
    assert (made.run_id, made.min_nodes, made.max_nodes, made.local_addr) == ("run", 1, 4, None)
    assert (made.join_timeout, made.last_call_timeout, made.close_timeout, made.heartbeat_timeout) == (600, 30, 30, 5)
    assert (made.lease, made.replacement_timeout, made.read_timeout, made.ttl) == (6, 0, 60, 86400)
    assert (made.key_prefix, made.protocol, made.topology) == ("redelastic", "native", "")


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize(("value", "read"), [("12.5", 12.5), (12.5, 12.5), (40, 40.0), (" 40 ", 40.0), ("1e2", 100.0)])
def test_seconds_are_numbers_or_their_text(name: str, value: object, read: float) -> None:
    assert getattr(settings(**{name: value}), name) == read


NO_SECONDS: list[object] = ["", "soon", "1,5", "1 s", "nan", "inf", "-inf", "-0.5", "9" * 10_000, -1, 1e-9, 1e10]
NO_SECONDS += [math.nan, math.inf, 10**400, True, [], {}, b"x"]


@pytest.mark.parametrize(("value", "read"), [(0, 0), ("0", 0), ("2", 2), (1, 1)])
def test_min_replicas_may_be_zero(value: object, read: int) -> None:
    assert settings(min_replicas=value).min_replicas == read


@pytest.mark.parametrize("value", ["", "one", -1, 1.5, False, "0.0"])
def test_invalid_min_replicas_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"parameter min_replicas=.* must be a whole number"):
        settings(min_replicas=value)


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", NO_SECONDS, ids=lambda value: repr(value)[:20])
def test_invalid_seconds_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"parameter {name}=.* must be a number of seconds: 0.001 to 10") as refused:
        settings(**{name: value})
    assert len(str(refused.value)) < 250
    if value not in (NO_SECONDS[8], 10**400):  # too long to be shown in full
        assert f"{name}={value!r} " in str(refused.value)


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("zero", [0, "0", 0.0])
def test_only_waits_may_be_zero(name: str, zero: object) -> None:
    if name in MAY_BE_ZERO:
        assert getattr(settings(**{name: zero}), name) == 0
    else:
        with pytest.raises(ValueError, match=f"parameter {name}={zero!r} must be"):
            settings(**{name: zero})


def test_attempts_are_whole_numbers() -> None:
    assert settings(keep_alive_max_attempt="5", keep_alive_interval=2).lease == 10
    for wrong in (0, "0", -1, 1.5, "1.5", "x", "", True, None.__class__, 10**7, 10**5000):
        with pytest.raises(ValueError, match=r"keep_alive_max_attempt=.* must be a whole number: 1 to 1000000"):
            settings(keep_alive_max_attempt=wrong)


def test_a_parameter_that_is_none_keeps_its_default() -> None:
    assert settings(join_timeout=None, topology=None, keep_alive_max_attempt=None) == settings()


@pytest.mark.parametrize("value", ["", "Native", "c10d", 1, True])
def test_the_protocol_is_one_of_two(value: object) -> None:
    with pytest.raises(ValueError, match=f"protocol={value!r} must be one of native, dynamic"):
        settings(protocol=value)
    assert settings(protocol="dynamic").protocol == "dynamic"


@pytest.mark.parametrize("value", ["http", "https"])
def test_etcds_protocol_is_known_as_such(value: str) -> None:
    """Users who come from etcd have it in their --rdzv-conf."""
    with pytest.raises(ValueError, match=f"protocol={value!r} is for etcd: remove it.*rediss://"):
        settings(protocol=value)


@pytest.mark.parametrize("sign", ['"', "'"])
@pytest.mark.parametrize("written", ["join_timeout=60", "join_timeout=60,read_timeout=2"])
def test_quotes_around_the_whole_of_rdzv_conf_are_removed(sign: str, written: str) -> None:
    expected = settings(**_parse_rendezvous_config(written))
    config = _parse_rendezvous_config(f"{sign}{written}{sign}")
    assert settings(**config, timeout=900) == expected, "torchrun adds a timeout"
    with pytest.raises(ValueError, match=f"--rdzv-conf begins with {sign} and does not end with it: remove it"):
        settings(**_parse_rendezvous_config(f"{sign}{written}"))


def test_names_of_torchs_other_backends() -> None:
    """torch's table of parameters calls the heartbeat's timeout heartbeat; etcd's users have a prefix of its own."""
    assert settings(heartbeat="3", etcd_prefix="jobs") == settings(heartbeat_timeout=3, key_prefix="jobs")
    url = "redis://h?run_id=a&min_nodes=1&max_nodes=2&etcd_prefix=jobs&heartbeat=3"
    assert parameters_from_url(url).config == {"key_prefix": "jobs", "heartbeat_timeout": "3"}
    with pytest.raises(ValueError, match="key_prefix is given under two of its names: give it once"):
        settings(etcd_prefix="jobs", key_prefix="others")
    assert settings(store_type="tcp") == settings(store_type=None) == settings()
    with pytest.raises(ValueError, match="store_type='file' is for c10d: remove it"):
        settings(store_type="file")


@pytest.mark.parametrize("name", ["ca_cert", "ssl_cert", "ssl_cert_key"])
def test_files_are_paths(name: str) -> None:
    assert getattr(settings(**{name: "/a.pem"}), name) == "/a.pem"
    for wrong in ("", 5, b"/a.pem"):
        with pytest.raises(ValueError, match=f"{name}={wrong!r} must be the path of a PEM file"):
            settings(**{name: wrong})


def test_the_files_reach_the_endpoint(tmp_path: Any) -> None:
    pem = tmp_path / "ca.pem"
    pem.touch()
    assert settings(ca_cert=str(pem)).endpoint("rediss://h").ca_cert == str(pem)
    with pytest.raises(ValueError, match="need TLS, but the endpoint is redis://h:6379: use rediss://"):
        settings(ca_cert=str(pem)).endpoint("redis://h")


@pytest.mark.parametrize("value", ["node1.example", "10.0.0.1", "fe80::1%eth0", "2001:db8::1"])
def test_a_local_address_is_a_host(value: str) -> None:
    assert settings(local_addr=value).local_addr == value


@pytest.mark.parametrize("value", ["", "a b", "a\nb", "a\x00", "\udcff", "[::1]", "x" * 201])
def test_invalid_local_addresses_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"The local_addr .*(empty|contains|not valid|at most)"):
        settings(local_addr=value)
    with pytest.raises(TypeError, match=r"The local_addr must be a string, not int"):
        settings(local_addr=5)


@pytest.mark.parametrize(
    ("low", "high"), [("x", 4), (1, "x"), (1.5, 4), (1, 4.0), (True, 4), (0, 4), (1, 0), (1, 10**7)]
)
def test_wrong_numbers_of_nodes_are_refused(low: Any, high: Any) -> None:
    params = RendezvousParameters("redis", "h", "run", 1, 4)
    params.min_nodes, params.max_nodes = low, high
    wrong = "min_nodes" if low != 1 or low is True else "max_nodes"
    with pytest.raises(ValueError, match=rf"parameter {wrong}=.* must be a whole number: 1 to 1000000"):
        Settings.from_parameters(params)


def test_min_nodes_above_max_nodes_is_refused() -> None:
    params = RendezvousParameters("redis", "h", "run", 1, 4)
    params.min_nodes = 5
    with pytest.raises(ValueError, match="min_nodes=5 is above max_nodes=4: give --nnodes=MIN:MAX"):
        Settings.from_parameters(params)


def test_a_ttl_outlives_the_lease() -> None:
    with pytest.raises(ValueError, match=r"ttl=11 must be at least twice the lease of 6 s .*keep_alive_interval"):
        settings(ttl=11)
    assert settings(ttl=12).ttl == 12


def test_an_unknown_parameter_is_named_but_not_its_value() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown rendezvous parameter 'password'; allowed: admit_interval, .*ttl\."
    ) as refused:
        settings(password="hunter2")
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ValueError, match=r"'join_time'.*join_timeout"):
        settings(join_time=5)


def test_parameters_that_torchrun_adds_are_accepted() -> None:
    assert settings(timeout=900, is_host="true") == settings()


@pytest.mark.parametrize("sign", ['"', "'"])
def test_quotes_of_rdzv_conf_are_taken_off(sign: str) -> None:
    config = _parse_rendezvous_config(
        f"is_host={sign}0{sign}, protocol={sign}dynamic{sign},topology={sign}rack-1{sign},ttl={sign}60{sign}"
    )
    made = settings(**config)
    assert (made.protocol, made.topology, made.ttl) == ("dynamic", "rack-1", 60)
    assert settings(topology=f"a{sign}b").topology == f"a{sign}b"
    assert settings(topology=sign).topology == sign
    assert settings(topology=sign * 2).topology == ""


KEY_PARTS = ["a", "a/b", "jöb-Ünicode-作业", "a:b", "-", "x" * 200, "é" * 100, "a'b\"c", "$(rm)", "%41"]
NO_KEY_PARTS = [
    ("", "is empty; give it a name of 1 to 200 bytes"),
    ("a b", "contains ' '"),
    ("a\tb", r"contains '\t'"),
    ("a\n", r"contains '\n'"),
    ("a\u3000b", r"contains '\u3000'"),
    ("a\x00", r"contains '\x00'"),
    ("{a}", "contains '{'"),
    ("a}", "contains '}'"),
    ("a*", "contains '*'"),
    ("a?", "contains '?'"),
    ("[a", "contains '['"),
    ("a\\", r"contains '\\'"),
    ("x" * 201, "has 201 bytes; at most 200"),
    ("x" * 10_000, "has 10000 bytes; at most 200"),
    ("é" * 101, "has 202 bytes"),
    ("\ud800", r"'\ud800' is not valid Unicode"),
    ("a\udcffb", "is not valid Unicode"),
]


@pytest.mark.parametrize("value", KEY_PARTS, ids=range(len(KEY_PARTS)))
def test_valid_key_parts_are_accepted(value: str) -> None:
    if "/" not in value:
        assert settings(run_id=value).run_id == value
    assert settings(key_prefix=value).key_prefix == value
    assert settings(topology=value).topology == value
    assert RunKeys(value, value).run == f"{value}:{{{value}}}:run"


def test_a_run_id_names_folders_too() -> None:
    with pytest.raises(ValueError, match="The run id 'team/exp:1' contains '/', and log folders are named by it"):
        settings(run_id="team/exp:1")


@pytest.mark.parametrize(("value", "says"), NO_KEY_PARTS, ids=range(len(NO_KEY_PARTS)))
def test_invalid_key_parts_are_refused(value: str, says: str) -> None:
    for what, make in (
        ("run id", lambda: settings(run_id=value)),
        ("key_prefix", lambda: settings(key_prefix=value)),
        ("topology", lambda: settings(topology=value)),
        ("run id", lambda: RunKeys(value)),
        ("key prefix", lambda: RunKeys("run", value)),
        ("store name", lambda: RunKeys("run").store(value)),
    ):
        if what == "topology" and not value:
            continue  # no label
        with pytest.raises(ValueError, match=rf"^The {what} ") as refused:
            make()
        text = str(refused.value)
        assert says in text
        assert len(text.encode()) < 1500


def test_a_key_part_is_text() -> None:
    for wrong in (None, 5, b"run"):
        with pytest.raises(TypeError, match=rf"run id must be a string, not {type(wrong).__name__}"):
            settings(run_id=wrong)
        with pytest.raises(TypeError, match="The x must be a string"):
            check_key_part("x", wrong)


def test_a_store_name_contains_no_separator() -> None:
    with pytest.raises(ValueError, match=r"'a:b' contains ':'.*use another character"):
        RunKeys("run").store("a:b")


def test_a_store_of_a_round_has_a_name_of_its_own() -> None:
    keys = RunKeys("run")
    assert keys.store(1).data != keys.store("1").data
    with pytest.raises(ValueError, match=r"'round:1' begins with 'round:', as only a round's does"):
        keys.store("round:1")


def test_the_keys_of_two_runs_never_meet() -> None:
    """One pattern for each run's ACL matches its own keys only."""
    runs = [RunKeys(run, prefix) for run in ("a", "a:b", "b") for prefix in ("p", "p:a", "q")]
    names = [{*keys.types, keys.state, keys.status("n"), *vars_of(keys)} for keys in runs]
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not one & other
    for keys, own in zip(runs, names, strict=True):
        assert all(name.startswith(f"{keys.prefix}:{{{keys.run_id}}}:") for name in own)


def vars_of(keys: RunKeys) -> list[str]:
    store = keys.store("s")
    others = [store.dedup(b"s"), store.reply(b"s"), store.stream(b"k"), store.queue(b"k")]
    return [store.data, store.waits, *(key.decode() for key in others)]


# -- URLs


def test_a_url_holds_every_parameter() -> None:
    params = parameters_from_url(
        "redis://u:p%40@h:1/2?run_id=j%C3%B6b&min_nodes=2&max_nodes=3&local_addr=me&join_timeout=5&protocol=dynamic"
    )
    assert (params.backend, params.endpoint, params.run_id) == ("redis", "redis://u:p%40@h:1/2", "jöb")
    assert (params.min_nodes, params.max_nodes, params.local_addr) == (2, 3, "me")
    made = Settings.from_parameters(params)
    assert (made.join_timeout, made.protocol) == (5, "dynamic")
    assert made.endpoint(params.endpoint) == Endpoint("redis", (("h", 1),), db=2, username="u", password="p@")


def test_a_url_takes_the_names_of_torchs_etcd_url() -> None:
    params = parameters_from_url("redis://h?run_id=r&min_workers=2&max_workers=3&timeout=7&prefix=p")
    made = Settings.from_parameters(params)
    assert (made.min_nodes, made.max_nodes, made.join_timeout, made.key_prefix) == (2, 3, 7, "p")


def test_the_endpoints_own_options_stay_with_it() -> None:
    url = "redis+sentinel://a:1,b:2/m?run_id=r&db=3&min_nodes=1&sentinel_password=x%26%3D%20y&max_nodes=1"
    params = parameters_from_url(url)
    endpoint = Settings.from_parameters(params).endpoint(params.endpoint)
    assert (endpoint.db, endpoint.sentinel_password, endpoint.service) == (3, "x&= y", "m")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_takes_parameters(scheme: str) -> None:
    rest = {"unix": "/run/s", "redis+sentinel": "h/m", "rediss+sentinel": "h/m"}.get(scheme, "h")
    params = parameters_from_url(f"{scheme}://{rest}?run_id=r&min_nodes=1&max_nodes=1")
    assert Settings.from_parameters(params).endpoint(params.endpoint).scheme == scheme


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://u:hunter2@h/0", "The URL redis://h/0 lacks run_id; it needs ?run_id="),
        ("redis://u:hunter2@h?run_id=r&max_nodes=1", "lacks min_nodes"),
        ("redis://u:hunter2@h?run_id=r&min_nodes=1", "lacks max_nodes"),
        (
            "redis://u:hunter2@h?run_id=r&min_nodes=1&min_workers=1&max_nodes=1",
            "gives min_nodes twice (as min_workers)",
        ),
        ("redis://h?sentinel_password=hunter2&sentinel_password=hunter2", "gives sentinel_password twice"),
        ("redis://u:hunter2@h?run_id=r&run_id=r&min_nodes=1&max_nodes=1", "gives run_id twice"),
        ("redis://u:hunter2@h?run_id=r&min_nodes=x&max_nodes=1", "min_nodes='x' must be a whole number"),
        ("redis://u:hunter2@h?run_id=r&min_nodes=1&max_nodes=0", "max_nodes='0' must be a whole number"),
        ("redis://u:hunter2@h?run_id=r&min_nodes=3&max_nodes=2", "min_nodes=3 above max_nodes=2"),
        ("redis://u:hunter2@h?run_id=&min_nodes=1&max_nodes=1", "The run id is empty"),
        ("redis://u:hunter2@h?run_id=%7Br%7D&min_nodes=1&max_nodes=1", "contains '{'"),
        ("redis://u:hunter2@h?run_id=r&min_nodes=1&max_nodes=1&ttl=x", "ttl='x' must be a number of seconds"),
        ("redis://u:hunter2@h?run_id=r&min_nodes=1&max_nodes=1&ttle=1", "unknown options ['ttle']"),
        ("http://u:hunter2@h?run_id=r&min_nodes=1&max_nodes=1", "scheme 'http' is unknown"),
        ("h:1?run_id=r&min_nodes=1&max_nodes=1", "has no scheme"),
    ],
)
def test_a_wrong_url_is_refused(url: str, says: str) -> None:
    def read() -> Endpoint:
        params = parameters_from_url(url)
        return Settings.from_parameters(params).endpoint(params.endpoint)

    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        read()
    assert "hunter2" not in str(refused.value)
