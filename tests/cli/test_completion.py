"""`redelastic completion`, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from redelastic import cli
from redelastic.cli.completion import SHELLS
from tests.support.commands import run_command
from tests.support.long_tests import quick_first

# Commands that complete the line in $2 with the script in $1; they print one word a line.
COMPLETERS = {
    "bash": 'source "$1"; read -ra COMP_WORDS <<<"$2"; [[ $2 == *" " ]] && COMP_WORDS+=(""); '
    "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$2; COMP_POINT=${#2}; "
    "$(complete -p redelastic | sed 's/.*-F \\([^ ]*\\).*/\\1/') redelastic \"${COMP_WORDS[COMP_CWORD]}\"; "
    'printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'source $argv[1]; complete -C $argv[2] | string replace -r "\\t.*" ""',
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        done = run_command("completion", shell)
        assert (done.code, done.err) == (0, "")
        (folder / shell).write_text(done.out)
    return {shell: folder / shell for shell in SHELLS}


def shell_of(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: apt-get install {name}")
    return found


@pytest.mark.parametrize("shell", quick_first(COMPLETERS))
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("redelastic sta", {"status"}),
        ("redelastic ", {found.NAME for found in cli.COMMANDS} | {"run"}),
        ("redelastic status --wa", {"--watch"}),
        ("redelastic run --max-job-r", {"--max-job-restarts"}),
        ("redelastic run --nproc-per", {"--nproc-per-node"}),
        ("redelastic completion f", {"fish"}),
    ],
)
def test_words_are_completed(scripts: dict[str, Path], shell: str, line: str, expected: set[str]) -> None:
    done = subprocess.run(
        [shell_of(shell), "-c", COMPLETERS[shell], *([shell] if shell == "bash" else []), scripts[shell], line],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = set(done.stdout.split())
    assert expected <= found, done
    if not line.endswith(" "):
        assert all(word.startswith(line.rpartition(" ")[2]) for word in found), found


@pytest.mark.long
def test_zsh_loads_its_script(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "_redelastic").write_text(scripts["zsh"].read_text())
    load = (
        "fpath=($PWD $fpath); autoload -U compinit; compinit -D -u; print $_comps[redelastic]; autoload +X _redelastic"
    )
    done = subprocess.run(
        [shell_of("zsh"), "-fc", load], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("_redelastic\n", "")
    text = scripts["zsh"].read_text()
    for found in (*(found.NAME for found in cli.COMMANDS), "run", "--max-job-restarts", "--nproc-per-node"):
        assert found in text


def test_wrong_arguments() -> None:
    done = run_command("completion", "tcsh")
    assert done.code == 2
    assert done.err.count("\n") == 1
