"""A writer of torch.distributed.checkpoint whose slow half runs beside the training.

Megatron saves with it what is not made of its shards (`--ckpt-format fsdp_dtensor`, `torch_dcp`).
Planning remembers what this rank writes, `get_save_function_and_args` gives the parts of an
`AsyncRequest` that copy it to host memory and write the files, and the results are taken when all
ranks have written; see `state_dict_saver`. The drop-in's own strategies do not use it.

Megatron's own file does not copy tensors of the CPU: it relies on a process that is forked when the
save is scheduled. The drop-in's queue runs threads, which would write what training has changed.
"""

from __future__ import annotations

import io
import os
import queue
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.strategies.async_utils import run_here

_results_queue = None
"""No process of its own writes, so there is no queue between processes to shut down."""


def get_write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:  # noqa: ARG001
    """A queue for results; a writer keeps its own results itself."""
    return queue.Queue()


class _Staged(DefaultSavePlanner):
    """Gives the writer copies of the data that a planner would give it."""

    def __init__(self, data: dict[MetadataIndex, torch.Tensor | io.BytesIO]) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._data[write_item.index]


class FileSystemWriterAsync(FileSystemWriter):
    """Writes files as `FileSystemWriter` does, in two halves; it knows no multi-storage client."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        if use_msc:
            raise CheckpointingException(
                f"{path}: the multi-storage client is not supported\nSave to a path of a file "
                "system, or in the format torch_dist, which takes a URL"
            )
        super().__init__(path, *args, **kwargs)
        self.separation_hint = separation_hint
        self._planned: tuple[SavePlan, SavePlanner] | None = None
        self._results: list[WriteResult] | WRAPPED_EXCEPTION = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Remember what this rank is to write."""
        self._planned = plan, planner

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None], Callable[[], Callable[[], None]], tuple[None, None]]:
        """The slow half, what copies the data to host memory before it, and its arguments."""
        return run_here, self._staged, (None, None)

    def _staged(self) -> Callable[[], None]:
        """Copy what is to be written; the slow half writes the copies."""
        assert self._planned is not None, "nothing is planned"
        plan, planner = self._planned
        data: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        for item in plan.items:
            found: Any = planner.resolve_data(item)
            is_tensor = isinstance(found, torch.Tensor)
            data[item.index] = found.detach().to("cpu", copy=True) if is_tensor else found

        def write() -> None:
            try:
                self._results = self.write_preloaded_data(plan, _Staged(data))
            except Exception as error:  # noqa: BLE001 - `save_state_dict_async_finalize` raises it
                self._results = _wrap_exception(error)

        return write

    def write_preloaded_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        return self.write_data(plan, planner).wait()

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """The results of this rank's writing, or the error."""
        return self._results
