"""Why some of Megatron's own tests do not pass on the drop-in, and need not."""

from __future__ import annotations

import re

_REASONS = {
    r"::test_errors_are_reported": (
        "replaces FileSystemWriterAsync.write_preloaded_data, by which Megatron's own strategy "
        "writes; nothing in Megatron 0.15 to 0.19 but this test replaces it, and saves of the "
        "drop-in do not go through it"
    ),
    r"::TestCrossRanksReads::": (
        "looks into the load planner of torch.distributed.checkpoint; loads of the drop-in do not "
        "go through it"
    ),
    r"::test_(no_)?global_metadata_reuse": (
        "asks whether Megatron's own planner used a plan again; the drop-in keeps its plans unasked"
    ),
    r"test_flattened_resharding.*::test_load_tensor_metadata": (
        "wants flattened tensors listed in one dim; the drop-in gives them their true shape"
    ),
    r"::test_flattened_tensors_are_properly_validated": (
        "wants one rank to raise; with the drop-in every rank raises"
    ),
    r"::test_cpu_tensors_dont_take_too_much_space": (
        "looks for two files a rank by name; the drop-in writes one, whose name has the save's id"
    ),
    r"::test_save_verify_integrity_manifest_with_ckpt": (
        "looks for a file of a rank by name; that of the drop-in has the save's id"
    ),
    r"::test_get_async_strategy\[nvrx\]": ("needs a newer nvidia-resiliency-ext"),
    r"::test_(sharded_metadata|remove_sharded_tensors)": (
        "of 0.19, looks for the common state among the objects; the drop-in writes common.pt, as "
        "releases before do, and reads both"
    ),
    r"::test_determine_global_metadata_uses_explicit_process_group": (
        "replaces torch.distributed.all_gather_object, and gives a stand-in for a group"
    ),
    r"::test_oom_is_handled": "fills the memory of a GPU",
    r"test_mamba": "needs mamba-ssm, which needs a GPU",
    r"test_moe_experts": "imports Transformer Engine, which needs a GPU",
    r"::test_optimizer_common_state_dict.*kwargs2": (
        "needs the attention of Transformer Engine, which needs a GPU"
    ),
    r"test_fp8": "needs Transformer Engine, which needs a GPU",
}


def reason_of(test: str) -> str:
    """Why a test, by its name as pytest has it, does not pass; empty if that is not known."""
    return next((reason for name, reason in _REASONS.items() if re.search(name, test)), "")
