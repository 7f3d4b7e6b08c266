"""`remesh demo`: one training job, killed while it saves, continued in two other layouts.

A small transformer trains on real text on the CPU, in several processes. Run A is the reference
and is left alone. Run B is the same job, saving as it goes, and one of its ranks is killed in the
middle of a save. Runs C and D continue from the newest checkpoint that was committed: C on half
the ranks, D tensor parallel. In run E, under `remesh run`, a rank is killed and the others go on in
their processes. All losses must be those of run A.

`story` tells it, in this order: `launch` starts and watches the processes of a run, `worker` is
what each process does, `picture` draws the layouts, `report` prints. `config` says what is run;
it and everything else that the starting process imports is free of torch, which the worker
processes load once between them.
"""

from remesh.demo.result import DemoResult
from remesh.demo.story import tell

__all__ = ["DemoResult", "tell"]
