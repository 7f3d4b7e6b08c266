"""The control plane: jobs that go on while machines die, leave and join.

A *master* knows which nodes there are and forms *worlds* of them; an *agent* on each node starts
the training processes and does what the master says. What is decided lives in pure modules,
functions of a state, an event and the time, which know no socket and no clock:

- `rendezvous`: which nodes form the world, and when it has to be formed anew
- `failures`: whose fault a failure is, and what follows from it
- `checks`: which nodes are tested together, and what the tests prove
- `progress`: useful time, hanging and slow ranks

`protocol` holds the messages. The shells around them are the master (`master`, with its `journal`
and page) and, on the nodes, the handler for torchrun, the agent and the node check. Only these last
three import torch.
"""
