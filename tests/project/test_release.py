"""What is published: the wheel has the whole package and nothing else, and serves torchrun without the source tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

import redelastic
from redelastic.redis.server import RedisServer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).parents[2]

# A job's script: it imports the wheel's package, and the wheel's plugin and Lua form its process group.
WORKER: Final = """
import redelastic, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if dist.get_rank() == 0:
    print("sum", int(one), "of", redelastic.__file__)
dist.destroy_process_group()
"""


def build(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, timeout=60, capture_output=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of this tree."""
    if not (ROOT / "redelastic").is_dir():
        pytest.skip("there is no source tree here: the tests run on an installed wheel")
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_is_the_package(wheel: zipfile.ZipFile) -> None:
    source = {path.relative_to(ROOT) for path in (ROOT / "redelastic").rglob("*") if path.is_file()}
    package = {str(path) for path in source if "__pycache__" not in path.parts}
    described = f"redelastic-{redelastic.__version__}.dist-info"
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert set(wheel.namelist()) == package | {f"{described}/{name}" for name in about}
    assert package >= {f"redelastic/{name}" for name in ("py.typed", "PROTOCOL.md", "FAULTS.md", "lua/join.lua")}


def test_the_sdist_has_the_source_files_and_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", path, "-C", tmp_path], check=True)  # Python before 3.11.4 has no safe way of its own
    source = tmp_path / path.name.removesuffix(".tar.gz")
    expected = ("README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "tests/conftest.py", "benchmarks/README.md")
    assert [name for name in expected if not (source / name).is_file()] == []
    build(source, tmp_path / "again")
    (first, second) = (next(folder.glob("*.whl")).read_bytes() for folder in (built, tmp_path / "again"))
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--rdzv-backend=redis", "--rdzv-endpoint=", "--rdzv-id=wheel", "--nnodes=1"],
        ["redelastic", "run", "--standalone"],
    ],
    ids=["torchrun", "redelastic run"],
)
def test_the_wheel_alone_runs_a_job(
    launcher: list[str], wheel: zipfile.ZipFile, server: RedisServer, tmp_path: Path
) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    wheel.extractall(site)  # as an installer does
    elsewhere.mkdir()
    (elsewhere / "worker.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(site), "REDELASTIC_REDIS_URL": server.url, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "--nproc-per-node=2", "worker.py"],
        cwd=elsewhere, env=environment, check=False, timeout=100, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sum 2 of {site / 'redelastic' / '__init__.py'}\n"


class TestImage:
    """What the Dockerfile installs."""

    def test_has_all_from_the_lock_file(self) -> None:
        """All but torch: pip downloads nothing else, not even to build the wheel."""
        installs = re.findall(r"pip install --no-cache-dir (.+)", (ROOT / "Dockerfile").read_text())
        assert len(installs) == 3, "each of them is checked here"
        assert re.search(r" torch==[0-9.]+$", installs[0])
        assert installs[1] == "--no-deps --require-hashes -r /src/image.lock"
        assert installs[2] == "--no-deps --no-build-isolation /src && pip check", "nothing is missing"

    def test_lock_file_has_hashes_and_fits_the_requirements(self) -> None:
        lock = (ROOT / "image.lock").read_text().replace("\\\n", "")
        lines = [line.split() for line in lock.splitlines() if not line.startswith("#")]
        pins = dict(line[0].split("==") for line in lines)
        for _, *hashes in lines:
            assert hashes
            assert [word for word in hashes if not re.fullmatch("--hash=sha256:[0-9a-f]{64}", word)] == []
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        extras = project["project"]["optional-dependencies"]
        texts = [*project["project"]["dependencies"], *extras["server"], *extras["demo"], *extras["gpu"]]
        texts += project["build-system"]["requires"]
        wanted = [need for need in map(Requirement, texts) if need.name not in ("torch", "redelastic")]
        assert "torch" not in pins
        for need in wanted:
            if need.marker is None or need.marker.evaluate({"python_version": "3.11"}):
                assert need.specifier.contains(pins[need.name]), need
