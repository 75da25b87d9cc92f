"""What a worker's last words say about the cause of its failure."""

from __future__ import annotations

import pytest

from redelastic.workers.last_words import last_exception, names_a_peer


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1",
        "RuntimeError: Application timeout caused pair closure: gloo/transport",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "what():  [PG ID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
        "redelastic.store.requests.RoundBrokenError: round 3 is over",
    ],
)
def test_a_lost_peer_is_recognized(words: str) -> None:
    assert names_a_peer(words)


@pytest.mark.parametrize(
    "words", ["", "ValueError: bad batch", "torch.OutOfMemoryError: CUDA out of memory.", "KeyError: 'peer'"]
)
def test_other_failures_name_no_peer(words: str) -> None:
    assert not names_a_peer(words)


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (
            "ValueError: first\nstep 7\n[rank1]: Traceback …\n[rank1]: RuntimeError: second\n  exit\n",
            "RuntimeError: second",
        ),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  third\n", "what():  third"),
        ("Error rate: 3\nstep 7\n", ""),
    ],
)
def test_the_last_exception_of_a_log_is_found(log: str, last: str) -> None:
    assert last_exception(log) == last
