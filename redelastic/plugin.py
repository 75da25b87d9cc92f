"""The torchrun plugin: the entry point ``redis`` of the group ``torchrun.handlers``.

torch loads it while its elastic package is being imported, so it must not import torch until a handler is made.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes handlers: the same one each time, as torch's registry demands."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that torchrun asks for; see :func:`redelastic.rendezvous.handler.handler_from_parameters`.

    Raises:
        ValueError: as there; or torchrun got no ``--rdzv-id``: all jobs without one would be the same run.
    """
    from .agent.regrouping import install_agent_in_torchrun
    from .logs import set_up_logging
    from .rendezvous.handler import handler_from_parameters

    if params.run_id == "none":  # torchrun's default
        raise ValueError(
            "--rdzv-id is missing: give the job an id that is unique on this Redis. "
            "If another launcher calls torchrun, such as `accelerate launch`, set PET_RDZV_ID."
        )
    set_up_logging(logging.getLogger("redelastic"))
    install_agent_in_torchrun()
    return handler_from_parameters(params)
