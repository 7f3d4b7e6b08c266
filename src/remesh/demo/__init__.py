"""`remesh demo`: one training job, killed while it saves, continued in two other layouts.

A small transformer trains on real text on the CPU, in several processes. Run A is the reference
and is left alone. Run B is the same job, saving as it goes, and one of its ranks is killed in the
middle of a save. Runs C and D continue from the newest checkpoint that was committed: C on half
the ranks, D tensor parallel. In run E a rank is killed between two steps, and the others go on in
their processes. All losses must be those of run A.

`story` plays each run with `remesh run`, says what must be true of it, and tells it, on the
terminal and on a page that `picture` draws; `worker` is what each process does, with what it trains
in `training`. Only the processes that train import torch.
"""

from remesh.demo.story import DemoResult, tell

__all__ = ["DemoResult", "tell"]
