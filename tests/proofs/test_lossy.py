"""The network loses requests and replies: each request has one effect, and each reply is the right one (I8)

This is a share of `lossy_campaign.py`; that command runs a million operations and a thousand rendezvous.
"""

from __future__ import annotations

import pytest

from tests.proofs.lossy_campaign import campaign
from tests.support.fault_matrix import Measured
from tests.support.faulty_proxy import Chance
from tests.support.long_tests import LONG

SEED = 7
pytestmark = pytest.mark.timeout(300)


def run(operations: int, rendezvous: int, measured: Measured) -> None:
    result = campaign(operations, rendezvous, SEED)
    assert (result.operations, result.rendezvous) == (operations, rendezvous)
    for kind in Chance.KINDS:
        may_miss = not LONG and (rendezvous or kind == Chance.RARE)  # of some twenty faults, and of one in fifty
        assert result.faults[kind] > 0 or may_miss, f"{kind} did not happen: {result.faults}"
    assert result.faults.total() > 0
    measured("operations", operations, "") if operations else measured("rendezvous", rendezvous, "")
    for kind in Chance.KINDS:
        measured(kind, result.faults[kind], "")


@pytest.mark.fault(
    "requests and replies of the store are lost, late, cut short or withheld, at random",
    "I8: each add, append, swap and item counts once, and replies are the right ones",
)
def test_operations(measured: Measured) -> None:
    run(30_000 if LONG else 5_000, 0, measured)


@pytest.mark.fault(
    "requests and replies of rendezvous are lost, late, cut short or withheld, at random",
    "I2, I8: all nodes agree on each round, and the record equals the oracle's",
)
def test_rendezvous(measured: Measured) -> None:
    run(0, 40 if LONG else 10, measured)
