"""Hugging Face's Trainer, saved and resumed by remesh.

    python examples/huggingface_trainer.py
    torchrun --nproc-per-node 2 examples/huggingface_trainer.py

Interrupt it and run it again: it goes on after the newest checkpoint in `run`, on as many processes
as there are then, and ends with the same weights as if nothing had happened. The model is a small
GPT-2 with dropout; the data are made up.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import remesh
from remesh.training.integrations.huggingface import RemeshCallback


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences to learn: each counts up from somewhere."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


def train(args: argparse.Namespace, data: Dataset[dict[str, torch.Tensor]]) -> Trainer:
    """Train, from the newest checkpoint on if there is one."""
    set_seed(1)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=f"{args.directory}/trainer",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=2,
        save_strategy="no",  # remesh saves
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    root, memory_every = f"{args.directory}/checkpoints", args.memory_every
    with remesh.Manager(root, every=args.every, keep=3, memory_every=memory_every) as manager:
        callback = RemeshCallback(manager)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_point())
    return trainer


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2.")
    parser.add_argument("--directory", default="run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=3, help="steps from save to save")
    parser.add_argument("--memory-every", type=int, help="the same for snapshots in memory")
    return parser.parse_args(words)


if __name__ == "__main__":
    finished = train(parse_args(), Counting())
    print(f"finished step {finished.state.global_step}")
