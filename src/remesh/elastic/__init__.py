"""The control plane: jobs that go on while machines die, leave and join.

A *master* forms *worlds* of the nodes that join; an *agent* on each node starts the training
processes and follows the master. All decisions are made by pure modules, functions of a state, an
event and the time, without sockets and clocks:

- `failures`: the cause of a failure, and what follows from it
- `checks`: which nodes are tested together, and what the tests prove
- `progress`: useful time, hanging and slow ranks
- `job`: which nodes form the world, when it has to be formed anew, and all of it together, as one
  state that events change

`protocol` defines the messages of an agent's session with the master, whose two ends are `session`
and `server`. The shells around them are the master (`master`, with its `journal` and page)
and, on the nodes, the handler for torchrun, the agent and the node check. Only these last three
import torch.

The agent is such a function too (`lifecycle`): of what it sees of its processes and the master.

`entries` is what a training script uses: a function that is entered again in the same process when
the world changes. `collectives` is its connection to torch, `script` runs a training script and
ends it, and `process_socket` is what a process and its agent say to each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.elastic.entries import run as run
    from remesh.elastic.training_job import TrainingJob as TrainingJob
else:
    from remesh._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {"remesh.elastic.entries": ("run",), "remesh.elastic.training_job": ("TrainingJob",)},
    )

__all__ = ["TrainingJob", "run"]
