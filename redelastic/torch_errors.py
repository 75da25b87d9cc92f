"""Maps redelastic's errors to torch's rendezvous errors; a store's are mapped in ``store/requests.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError, RendezvousStateError

from .redis.errors import CorruptStateError, RedelasticError, UnavailableError
from .torch_internals import require_torch

require_torch()  # here, since the rendezvous, the store and the agent all need this module


@contextmanager
def torch_errors() -> Iterator[None]:
    """Raise torch's error for each of redelastic's; for a block, or as a decorator of what torch or a user calls.

    Raises:
        RendezvousConnectionError: for an :exc:`UnavailableError`.
        RendezvousStateError: for a :exc:`CorruptStateError`.
        RendezvousError: for any other :exc:`RedelasticError`. The cause of each is the original error.
    """
    try:
        yield
    except UnavailableError as e:
        raise RendezvousConnectionError(str(e)) from e
    except CorruptStateError as e:
        raise RendezvousStateError(str(e)) from e
    except RedelasticError as e:
        raise RendezvousError(str(e)) from e
