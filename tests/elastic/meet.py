"""What torchrun's processes do in the tests: meet, and reduce together until a file says stop.

`meet.py DIRECTORY`. Each process appends what it did to a file of its own there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def say(kind: str) -> None:
        what = {"kind": kind, "rank": rank, "size": world_size, "parent": os.getppid()}
        log.write(json.dumps({"time": time.time(), **what}) + "\n")

    num_stops = torch.zeros(1)
    met = False
    while num_stops.item() < world_size:
        num_stops = torch.ones(1) if (directory / "stop").exists() else torch.zeros(1)
        dist.all_reduce(num_stops)
        if not met:
            say("met")
        met = True
        time.sleep(0.05)
    say("end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
