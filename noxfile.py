"""The tasks of whoever works on redelastic: ``nox -l`` lists them; they run in the environment that is active."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["quick"]

# The protocol, the store and what most changes touch: hundreds of tests on one real server, and no torchrun.
QUICK = (
    "tests/proofs/test_oracle.py",
    "tests/proofs/test_oracle_stories.py",
    "tests/proofs/test_oracle_charges.py",
    "tests/rendezvous/test_settings.py",
    "tests/rendezvous/test_handler.py",
    "tests/rendezvous/test_keeper.py",
    "tests/redis/test_endpoint.py",
    "tests/store/test_store.py",
    "tests/monitoring/test_events.py",
    "tests/monitoring/test_history.py",
    "tests/monitoring/test_training_time_ratio.py",
    "tests/project/test_docs.py",
    "tests/workers/test_board.py",
)
PARALLEL = ("-n", "6", "--dist", "worksteal")


@nox.session
def quick(session: nox.Session) -> None:
    """Lint, types and the tests of plain logic: an answer within 45 s."""
    lint(session)
    session.run("pytest", "-q", *PARALLEL, *(session.posargs or QUICK), env={"REDELASTIC_ORACLE_EXAMPLES": "50"})


@nox.session
def lint(session: nox.Session) -> None:
    """What ruff and mypy say."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site, in site/; a broken link, a dead anchor or a page outside the nav fails."""
    session.run("bash", ".ci/docs", *session.posargs)


@nox.session
def suite(session: nox.Session) -> None:
    """All tests that are not long; the last lines say what was left out, and the time of each folder."""
    session.run("pytest", "-q", *PARALLEL, *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """The long tests, all of them or the parts named: ``nox -s long -- store faults``."""
    session.run("bash", ".ci/long", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """All tests that are not long, and what they measured written into FAULTS.md."""
    results = Path(session.create_tmp()) / "faults"
    results.unlink(missing_ok=True)
    session.run("pytest", "-q", *PARALLEL, env={"REDELASTIC_FAULTS": str(results)})
    session.run("python", "-m", "tests.support.fault_matrix", str(results))


@nox.session
def ci(session: nox.Session) -> None:
    """What a change has to pass: ``.ci/run``, which brings its own environment."""
    session.run("bash", ".ci/run")
