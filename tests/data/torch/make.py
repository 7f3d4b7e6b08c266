"""Writes the checkpoints beside it: run it with the Python and torch that a folder is named after.

python make.py tests/data/torch/py313-torch2.13
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp


def main(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            items = torch.arange(parameter.numel(), dtype=parameter.dtype) + number
            parameter.copy_(items.reshape(parameter.shape))
    numpy_state: Any = np.random.RandomState(0).get_state()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": 2,
        "args": argparse.Namespace(
            lr=0.1, path=pathlib.Path("runs/a"), pure=pathlib.PurePosixPath("b")
        ),
        "path": pathlib.Path("runs/ckpt"),
        "when": dt.datetime(2024, 5, 6, 7, 8),  # noqa: DTZ001 - as trainings write it
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "bf16": torch.arange(4).to(torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(4.0),
        "scalar": np.float64(2.5),
        "int8": np.int8(-3),
        "rng": {
            "numpy": numpy_state[0:1],
            "torch": torch.arange(8, dtype=torch.uint8),
        },
        "uint16": torch.arange(3).to(torch.uint16),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }
    torch.save(state, "training.pt")
    nested = {"model": model.state_dict(), "step": 2, "when": [1, 2]}
    dcp.state_dict_saver.save(nested, checkpoint_id=pathlib.Path("dcp"))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
