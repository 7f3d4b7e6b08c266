"""A training job of Megatron's own layers, optimizer and schedules, on ranks forked from a process.

`python -m tests.compat.megatron.end_to_end.job PACKAGE` reads runs from its standard input, one a
line, and answers each with a line of losses. A run builds a model in a layout, loads a checkpoint
or begins anew, trains, saves, and trains on. PACKAGE is `remesh` for the drop-in or `own` for
Megatron's own package; everything else is the same code. Only what the CPU lacks is replaced, by
`cuda_on_cpu`.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.compat.megatron.end_to_end import Run
from tests.compat.megatron.own_tests import cuda_on_cpu

VOCABULARY, LENGTH, LAYERS, EXPERTS, GLOBAL_BATCH = 32, 8, 4, 4, 8
dist: Any = torch.distributed


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _build(run: Run) -> tuple[Any, Any, Any]:
    """The model of this rank, wrapped for data parallelism, its optimizer and its configuration."""
    state, specs = _core("parallel_state"), _core("models.gpt.gpt_layer_specs")
    is_moe = run.model == "moe"
    config = _core("transformer").TransformerConfig(
        num_layers=LAYERS,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gated_linear_unit=True,
        add_bias_linear=not is_moe,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_moe_experts=EXPERTS if is_moe else None,
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=run.tensor,
        pipeline_model_parallel_size=run.pipeline,
        expert_model_parallel_size=run.expert,
        sequence_parallel=is_moe and run.tensor > 1,
        gradient_accumulation_fusion=False,
    )
    # Every run begins with the same weights whatever its layout.
    _core("tensor_parallel").model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    model = _core("models.gpt").GPTModel(
        config=config,
        transformer_layer_spec=specs.get_gpt_layer_local_spec(
            num_experts=EXPERTS if is_moe else None, moe_grouped_gemm=False
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    model = _core("transformer.module").Float16Module(config, model)
    distributed = _core("distributed")
    wrapped = distributed.DistributedDataParallel(
        config,
        distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        ),
        model,
    )
    wrapped.broadcast_params()
    optimizer = _core("optimizer").get_megatron_optimizer(
        _core("optimizer").OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [wrapped],
    )
    config.finalize_model_grads_func = distributed.finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer, config


def _batches(step: int) -> Iterator[torch.Tensor]:
    """The samples of a step that this rank trains on: those of all ranks are the same batch."""
    state = _core("parallel_state")
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    rank, size = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    for sample in range(rank, GLOBAL_BATCH, size):
        yield tokens[sample : sample + 1]


def _forward(batches: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
    tokens = next(batches)
    positions = torch.arange(LENGTH).unsqueeze(0)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return output, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})


def _train(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Train some steps; the loss of each, which is the same on all ranks."""
    state = _core("parallel_state")
    run_step = _core("pipeline_parallel").get_forward_backward_func()
    losses = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        of_microbatches = run_step(
            forward_step_func=_forward,
            data_iterator=_batches(step),
            model=[model],
            num_microbatches=GLOBAL_BATCH // state.get_data_parallel_world_size(),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        total = torch.zeros(2)
        if of_microbatches and state.get_tensor_model_parallel_rank() == 0:
            total[0] = sum(float(one["loss"]) for one in of_microbatches)
            total[1] = len(of_microbatches)
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
    return losses


def _described(model: Any, optimizer: Any, run: Run, step: int, *, loading: bool) -> dict[str, Any]:
    """The state of the job as Megatron describes it."""
    metadata = {"distrib_optim_sharding_type": run.optimizer_format}
    weights = model.module.sharded_state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
        "iteration": step,
    }


def _save(state: dict[str, Any], folder: str) -> None:
    checkpointing: Any = _core("dist_checkpointing")
    serialization = _core("dist_checkpointing.serialization")
    fully_parallel = _core("dist_checkpointing.strategies.fully_parallel")
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True)
    dist.barrier()
    strategy = fully_parallel.FullyParallelSaveStrategyWrapper(
        serialization.get_default_save_sharded_strategy(),
        _core("parallel_state").get_data_parallel_group(with_context_parallel=True),
    )
    checkpointing.save(state, folder, strategy, validate_access_integrity=True)


def _load(state: dict[str, Any], folder: str) -> dict[str, Any]:
    checkpointing: Any = _core("dist_checkpointing")
    serialization = _core("dist_checkpointing.serialization")
    fully_parallel = _core("dist_checkpointing.strategies.fully_parallel")
    strategy = fully_parallel.FullyParallelLoadStrategyWrapper(
        serialization.get_default_load_sharded_strategy(folder),
        _core("parallel_state").get_data_parallel_group(with_context_parallel=True),
    )
    loaded: dict[str, Any] = checkpointing.load(state, folder, strategy)
    return loaded


def _run_rank(rank: int, run: Run, store: str) -> list[float]:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=run.world_size
    )
    _core("parallel_state").initialize_model_parallel(
        run.tensor, run.pipeline, expert_model_parallel_size=run.expert
    )
    model, optimizer, _ = _build(run)
    step = 0
    if run.source:
        asked = _described(model, optimizer, run, 0, loading=True)
        loaded = _load(asked, run.source)
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        step = loaded["iteration"]
    losses = _train(model, optimizer, range(step, step + run.steps))
    if run.target:
        step += run.steps
        _save(_described(model, optimizer, run, step, loading=False), run.target)
        losses += _train(model, optimizer, range(step, step + run.steps))
    return losses


def _run(run: Run) -> list[float]:
    """The losses of a run, on ranks forked from this process."""
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(run.world_size):
            child = os.fork()
            if child == 0:
                _as_rank(rank, run, Path(scratch))
            children.append(child)
        failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
        if failed:
            logs = "\n".join(Path(scratch, f"{rank}.log").read_text()[-4000:] for rank in failed)
            raise RuntimeError(f"{run}: ranks {failed} failed\n{logs}")
        return msgspec.json.decode(Path(scratch, "losses").read_bytes(), type=list[float])


def _as_rank(rank: int, run: Run, scratch: Path) -> None:
    code = 1
    try:
        with (scratch / f"{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.world_size))
        losses = _run_rank(rank, run, str(scratch / "store"))
        if rank == 0:
            (scratch / "losses").write_bytes(msgspec.json.encode(losses))
        code = 0
    except BaseException:  # noqa: BLE001 - its log is what the parent reports
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Answer each run with its losses."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cuda_on_cpu.install()
    if sys.argv[1] == "remesh":
        from remesh.compat import megatron

        megatron.install()
    for name in ("models.gpt", "pipeline_parallel", "distributed"):
        _core(name)
    cuda_on_cpu.with_fused_adam()
    cuda_on_cpu.with_fused_norm()
    # A name that Megatron takes from Transformer Engine and looks at without it.
    vars(_core("transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
    for line in sys.stdin:
        try:
            losses = _run(msgspec.json.decode(line, type=Run))
        except RuntimeError as error:
            sys.stderr.write(f"{error}\n")
            sys.stdout.write("failed\n")
        else:
            sys.stdout.write(f"losses {' '.join(map(repr, losses))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
