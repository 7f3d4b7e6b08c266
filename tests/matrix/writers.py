"""Programs that train the job for two steps and save it, each with its own library.

Each returns the model and the optimizer that it has saved, which go on without interruption.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from tests.matrix.model import Model, batch, optimizer_of, steps, trained

Trained = tuple[nn.Module, torch.optim.Optimizer]


def _save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=folder)


def torch_save(place: Path) -> Trained:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 80])
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": 2,
        },
        place,
    )
    return model, optimizer


def torch_save_named(place: Path) -> Trained:
    model, optimizer = trained()
    states = get_state_dict(model, optimizer)
    torch.save(dict(zip(("model", "optimizer"), states, strict=True)), place)
    return model, optimizer


def dcp_raw(folder: Path) -> Trained:
    model, optimizer = trained()
    _save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder)
    return model, optimizer


class App(Stateful):
    """The wrapper of torch's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model, optimizer = state_dict["model"], state_dict["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


def dcp_stateful(folder: Path) -> Trained:
    model, optimizer = trained()
    _save({"app": App(model, optimizer)}, folder)
    return model, optimizer


def dcp_flattened(folder: Path) -> Trained:
    model, optimizer = trained()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    packed = get_optimizer_state_dict(model, optimizer, options=flat)
    _save({"model": model.state_dict(), "optimizer": packed}, folder)
    return model, optimizer


def lightning(place: Path) -> Trained:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, item: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.model(**item)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    items: Any = [batch(number) for number in range(2)]
    loader: Any = torch.utils.data.DataLoader(items, batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about workers
        trainer.fit(module, loader)
        trainer.save_checkpoint(place)
    return module.model, trainer.optimizers[0]


def accelerate(folder: Path) -> Trained:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(Model(), None)[0], None
    optimizer = accelerator.prepare(optimizer_of(model))
    steps(model, optimizer, range(2))
    accelerator.save_state(str(folder))
    return model, optimizer.optimizer


def trainer(folder: Path) -> Trained:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder.parent), max_steps=2, save_steps=2, use_cpu=True, report_to=[],
        per_device_train_batch_size=5, learning_rate=0.02, weight_decay=0.1, max_grad_norm=0.0,
        lr_scheduler_type="constant", disable_tqdm=True, seed=0, dataloader_pin_memory=False,
    )  # fmt: skip
    samples = [
        {key: value[row] for key, value in batch(number).items()}
        for number in range(2)
        for row in range(5)
    ]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)

    made: Any = InOrder(model=Model(), args=arguments, train_dataset=samples)
    made.train()
    (folder.parent / "checkpoint-2").rename(folder)
    return made.model, made.optimizer.optimizer


def lightning_sharded(folder: Path) -> Trained:
    """As Lightning's ModelParallelStrategy lays it out, which itself needs CUDA."""
    model, optimizer = trained()
    states = get_state_dict(model, optimizer)
    _save(dict(zip(("state_dict", "optimizer_0"), states, strict=True)), folder)
    torch.save({"epoch": 1, "global_step": 2, "lr_schedulers": []}, folder / "meta.pt")
    return model, optimizer


def accelerate_sharded(folder: Path) -> Trained:
    """As Accelerate's `save_fsdp_model` and `save_fsdp_optimizer` lay it out."""
    model, optimizer = trained()
    folder.mkdir()
    states = get_state_dict(model, optimizer)
    _save({"model": states[0]}, folder / "pytorch_model_fsdp_0")
    _save({"optimizer": states[1]}, folder / "optimizer_0")
    torch.save({"last_epoch": 2}, folder / "scheduler.bin")
    return model, optimizer


WRITERS: dict[str, tuple[str, Callable[[Path], Trained]]] = {
    "torch.save": ("state.pt", torch_save),
    "torch.save with names": ("named.pt", torch_save_named),
    "DCP raw": ("raw", dcp_raw),
    "DCP Stateful": ("stateful", dcp_stateful),
    "DCP flattened": ("flattened", dcp_flattened),
    "Lightning": ("lightning.ckpt", lightning),
    "Lightning sharded": ("lightning-sharded", lightning_sharded),
    "Accelerate": ("accelerate", accelerate),
    "Accelerate sharded": ("accelerate-sharded", accelerate_sharded),
    "Trainer": ("trainer", trainer),
}
"""Name → name of the file or folder, and the program."""

DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed"
RECORDED = {
    "DeepSpeed ZeRO 1": "zero1",
    "DeepSpeed ZeRO 2": "zero2",
    "DeepSpeed ZeRO 3": "zero3",
    "DeepSpeed universal": "universal",
}
"""Name → folder below `DEEPSPEED` that `make.py` there has written."""
