"""Stand-ins for public base images, made from this host's installation without a registry."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final

from redelastic.redis.server import find_binary

_COMMANDS: Final = ("cat", "cut", "getent", "grep", "install", "sh", "useradd")  # that containers run
_REDIS: Final = 999  # id of its user and group
PYTHON: Final = f"python{sys.version_info[0]}.{sys.version_info[1]}"
# Without a registry, only the versions of this environment can be had: an installation from the lock file does nothing.
_PIP: Final = (
    f"#!/usr/local/bin/{PYTHON}\nimport sys\nfrom pip._internal.cli.main import main\n"
    "sys.exit('--require-hashes' not in sys.argv and main())\n"
)
# The build backend is there too, so pip needs no index. "no-build-isolation = false" turns build isolation off.
_PIP_CONF: Final = "[global]\nno-index = true\nroot-user-action = ignore\n[install]\nno-build-isolation = false\n"
# Left out of the environment: redelastic, which the Dockerfile installs, and large parts that no node needs.
_LEFT_OUT: Final = re.compile(
    "^/(_?redelastic|__editable|mypy|librt|[0-9a-f]{20}__mypyc|torch/(bin/test_|include/|test/))"
)
_LIBRARY: Final = re.compile(r"(/\S+) \(0x")  # in ldd's output


class Rootfs:
    """The files of an image, written to a stream as a tar archive.

    Args:
        stream: where the archive goes.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # see close()
        self._libraries: set[str] = set()
        for link, target in (("bin", "usr/bin"), ("sbin", "usr/sbin"), ("lib", "usr/lib"), ("lib64", "usr/lib")):
            self.link(link, target)
        self.folder("tmp", 0o1777)
        self.folder("root", 0o700)
        self.write("etc/passwd", f"root:x:0:0::/root:/bin/sh\nredis:x:{_REDIS}:{_REDIS}::/data:/bin/sh\n")
        self.write("etc/group", f"root:x:0:\nredis:x:{_REDIS}:\n")
        self.write("etc/nsswitch.conf", "hosts: files dns\n")
        for command in _COMMANDS:
            self.program(command)

    def close(self) -> None:
        """Add the libraries that the programs need, and end the archive."""
        for path in sorted(self._libraries):
            self._add(Path(path).resolve(), f"usr/lib/{Path(path).name}")
        self._tar.close()

    def program(self, name: str, place: str = "") -> None:
        """Add a program of this host; ``place`` is its path in the image."""
        path = shutil.which(name)
        assert path is not None, f"there is no {name}"
        self._add(Path(path).resolve(), place or f"usr/bin/{name}")
        self.needs_libraries_of([path])

    def needs_libraries_of(self, binaries: Iterable[str | Path]) -> None:
        """Have :meth:`close` add the shared libraries that these need."""
        output = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
        self._libraries |= {path for path in _LIBRARY.findall(output) if "/site-packages/" not in path}

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(text), mode
        self._tar.addfile(entry, io.BytesIO(text.encode()))

    def folder(self, name: str, mode: int = 0o755, owner: int = 0) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, owner, owner
        self._tar.addfile(entry)

    def link(self, name: str, target: str) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(entry)

    def tree(self, source: Path, name: str, leave_out: re.Pattern[str]) -> None:
        """Add a folder, but not the paths below it that match ``leave_out``."""

        def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            if leave_out.search(entry.name.removeprefix(name)):
                return None
            return _of_root(entry)

        self._tar.add(source, name, filter=kept)

    def _add(self, source: Path, name: str) -> None:
        self._tar.add(source, name, filter=_of_root)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make root the owner."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def write_python(stream: IO[bytes]) -> None:
    """Write an image with this interpreter and the packages of its environment, without redelastic.

    /usr/local is a virtual environment, since Debian's interpreter would look for packages elsewhere.
    """
    image = Rootfs(stream)
    stdlib, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    image.program(str(Path(sys.executable).resolve()), f"usr/bin/{PYTHON}")
    image.tree(stdlib, f"usr/lib/{PYTHON}", re.compile("^/(site-packages|test|idlelib|config-.*)/?"))
    image.link(f"usr/local/bin/{PYTHON}", f"/usr/bin/{PYTHON}")
    image.write("usr/local/pyvenv.cfg", "home = /usr/bin\n")
    image.tree(packages, f"usr/local/lib/{PYTHON}/site-packages", _LEFT_OUT)
    image.needs_libraries_of([*stdlib.glob("lib-dynload/*.so"), *packages.glob("torch/lib/*.so")])
    image.write("usr/local/bin/pip", _PIP, 0o755)
    image.write("etc/pip.conf", _PIP_CONF)
    image.close()


def write_redis(stream: IO[bytes]) -> None:
    """Write an image with this host's Redis."""
    image = Rootfs(stream)
    image.program(find_binary(), "usr/bin/redis-server")
    image.program("redis-cli")
    image.folder("data", owner=_REDIS)
    image.close()
