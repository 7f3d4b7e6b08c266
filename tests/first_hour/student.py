"""A student: one script, one process, who knows `torch.save`."""

from __future__ import annotations

from tests.first_hour.hour import Hour

TRAIN = """
import torch
import remesh

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
best = {"loss": 9e9}
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": best}
state["notes"] = None

with remesh.Manager("~/run", every=4, keep=2) as manager:
    resumed = manager.resume(state)
    first = resumed.step if resumed else 0
    print("from step", first, "best from step", state["best"].get("step"))
    for step in range(first + 1, first + 7):
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if loss.item() < state["best"]["loss"]:
            state["best"].update(loss=loss.item(), step=step)
        manager.step(step, state)
"""

MISTAKES = """
import sys

import torch
import remesh

model = torch.nn.Linear(4, 8)
state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
torch.save({"model": model.state_dict(), "epoch": 3}, "old.pt")

old = {"model": torch.nn.Linear(4, 8), "epoch": 0}
remesh.load(old, "old.pt")
print("epoch", old["epoch"])

remesh.save(model, "alone")
remesh.load(torch.nn.Linear(4, 8), "alone")
with remesh.Manager("managed") as manager:
    manager.save(1, model)
    print("resumed", manager.resume(model).step)

def attempt(name, call):
    try:
        call()
    except remesh.RemeshError as error:
        print(name, type(error).__name__, sep=": ")
        print(f"error: {error}", file=sys.stderr)

attempt("every", lambda: remesh.Manager("other", every="5"))
attempt("swapped", lambda: remesh.save("here", state))
attempt("nothing there", lambda: remesh.load(state, "nowhere"))
attempt("twice", lambda: remesh.save(state, "alone"))
attempt("other shape", lambda: remesh.load(torch.nn.Linear(5, 8), "alone"))
attempt("other names", lambda: remesh.load({"net": torch.nn.Linear(4, 8)}, "alone"))
attempt("a function", lambda: remesh.save({"model": model, "loss": lambda x: x}, "lambda"))
attempt("closed", lambda: manager.step(2, model))
"""


def play(hour: Hour) -> None:
    hour.run("remesh --help", shows=["Commands:", "doctor"])
    hour.run("python -m remesh --version", shows=["remesh"])
    hour.run(
        "remesh doctor .",
        ends=int(hour.is_in_memory),
        shows=["torch", "aiohttp", "good"],
    )
    hour.write("train.py", TRAIN)
    hour.run("python train.py", shows=["from step 0 best from step None"])
    hour.run("remesh ls run", shows=["step_00000006", "committed"])
    hour.run("python train.py", shows=["from step 6 best from step"])
    hour.run("remesh latest run", shows=["step_00000012"])
    hour.run("remesh ls run/step_00000012 --values", shows=["model.0.weight", "best.loss"])
    hour.run("remesh show run/step_00000012 model.0.weight", shows=["float32"])
    hour.run("remesh verify run", shows=["step_00000012"])
    hour.write("mistakes.py", MISTAKES)
    kinds = [
        "epoch 3",
        "resumed 1",
        "every: OptionError",
        "swapped: StateError",
        "nothing there: CheckpointNotFoundError",
        "twice: CheckpointExistsError",
        "other shape: MismatchError",
        "other names: MismatchError",
        "a function: UnsupportedValueError",
        "closed: StateError",
    ]
    remedies = ["every=1000", "save(state, path)", "overwrite=True", "transform=", "make a new one"]
    hour.run("python mistakes.py", shows=kinds, says=remedies)
