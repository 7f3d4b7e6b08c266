"""`remesh demo`: one training job, killed while it saves, continued in two other layouts.

A small transformer trains on real text on the CPU, in several processes. Run A is the reference
and is left alone. Run B is the same job, saving as it goes, and one of its ranks is killed in the
middle of a save. Runs C and D continue from the newest checkpoint that was committed: C on half
the ranks, D tensor parallel. In run E a rank is killed between two steps, and the others go on in
their processes. All losses must be those of run A.

`story` tells it, on the terminal and on a page that `picture` draws; `runs` plays a run with
`remesh run` and says what must be true of it; `worker` is what each process does, with what it
trains in `training`. Only the processes that train import torch.
"""

from remesh.demo.runs import DemoResult
from remesh.demo.story import tell

__all__ = ["DemoResult", "tell"]
