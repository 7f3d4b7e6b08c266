"""Messages between the ranks of one job, and the rule that an error on one rank reaches all.

An `Exchange` moves bytes: gather, scatter, broadcast, all-gather. What the bytes mean is the
caller's business. All methods are collective: every rank of the group calls the same methods in
the same order, which the engine guarantees by running every step that may fail through
`run_on_all`, `run_each`, `run_on_one` or `run_joined`, or in the block of an `Outcome`, which is
shared then. There a rank that fails still takes part, sending its error in place of its result, and
every rank raises it.

`Alone` is a job of one process, `ThreadGroup` one whose ranks are threads. The exchange over
a torch process group is `remesh.exchange.torch_group.TorchGroup`; it imports torch, so it is not
imported here.
"""

from remesh.exchange.protocol import Exchange
from remesh.exchange.protocol import Outcome as Outcome
from remesh.exchange.protocol import broadcast_outcome as broadcast_outcome
from remesh.exchange.protocol import decode_failure as decode_failure
from remesh.exchange.protocol import encode_failure as encode_failure
from remesh.exchange.protocol import join_outcomes as join_outcomes
from remesh.exchange.protocol import run_each as run_each
from remesh.exchange.protocol import run_joined as run_joined
from remesh.exchange.protocol import run_on_all as run_on_all
from remesh.exchange.protocol import run_on_one as run_on_one
from remesh.exchange.protocol import share_outcomes as share_outcomes
from remesh.exchange.threads import Alone, ThreadExchange, ThreadGroup

__all__ = ["Alone", "Exchange", "ThreadExchange", "ThreadGroup"]
