"""An engineer: has checkpoints of DCP, Hugging Face and Lightning, and trains on several ranks."""

from __future__ import annotations

from tests.first_hour.hour import Hour

THEIRS = """
import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 8)).sum().backward()
optimizer.step()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    state = {"model": model.state_dict(), "step": torch.tensor(7)}
    dcp.save(state, checkpoint_id="dcp", no_dist=True)

Path("hf").mkdir()
save_file(model.state_dict(), "hf/model.safetensors", metadata={"format": "pt"})
Path("hf/config.json").write_text(json.dumps({"model_type": "own"}))

loop = {"epoch_progress": {"current": {"completed": 2}}}
lightning = {
    "epoch": 2,
    "global_step": 7,
    "pytorch-lightning_version": "2.5.0",
    "state_dict": {f"net.{name}": tensor for name, tensor in model.state_dict().items()},
    "loops": {"fit_loop": loop},
    "optimizer_states": [optimizer.state_dict()],
    "lr_schedulers": [],
}
torch.save(lightning, "last.ckpt")
"""

TRAIN = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import remesh

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)

# One model, from each of three checkpoints.
remesh.load({"model": model}, "dcp")
remesh.load(model, "hf")
optimizer = torch.optim.AdamW(model.parameters())
state = {"state_dict": model, "optimizer_states": [optimizer]}
remesh.load(state, "last.ckpt", transform={"state_dict.net.": "state_dict."})
steps = {int(entry["step"]) for entry in optimizer.state.values()}

state = {"model": model, "optimizer": optimizer, "step": 7}
remesh.save(state, "run/step_00000007")
remesh.save(model, "exported", format="huggingface")
if dist.get_rank() == 0:
    print("optimizer steps", steps)
try:
    remesh.load({"model": torch.nn.Linear(8, 17)}, "dcp")
except remesh.MismatchError as error:
    if dist.get_rank() == 0:
        print("first line:", str(error).splitlines()[0])
dist.destroy_process_group()
"""


def play(hour: Hour) -> None:
    hour.write("theirs.py", THEIRS)
    hour.run("python theirs.py")
    hour.run("remesh ls .", shows=["dcp", "hf"])
    hour.run("remesh ls dcp", shows=["model.0.weight", "step"])
    hour.run("remesh ls last.ckpt", shows=["state_dict.net.0.weight"])
    hour.write("train.py", TRAIN)
    shown = ["optimizer steps {1}", "first line:"]
    torchrun = "python -m torch.distributed.run --standalone --nproc-per-node 2"
    hour.run(f"{torchrun} -m remesh.elastic.script train.py", shows=shown)
    hour.run("remesh diff hf exported")
