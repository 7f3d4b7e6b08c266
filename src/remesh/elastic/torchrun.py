"""Where torchrun finds `--rdzv-backend=remesh`: the entry point group `torchrun.handlers`.

torch imports this module in every launcher, in the middle of importing its own rendezvous, so it
imports nothing that imports torch before it is asked for a handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from remesh.elastic.handler import Handler


def _create(parameters: RendezvousParameters) -> Handler:
    from remesh.elastic.handler import make_handler
    from remesh.elastic.node_check import run_test

    return make_handler(parameters, run_test)


def create() -> Callable[[RendezvousParameters], Handler]:
    """The entry point that torchrun asks for: a function that makes handlers."""
    return _create
