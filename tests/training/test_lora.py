"""Models of peft: exported for peft and transformers, filled from peft's folders, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import remesh
from remesh.errors import CheckpointNotFoundError, MismatchError, StateError
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from remesh.training.export import export_weights
from tests.recipes.models import make
from tests.support import Raised, run_processes, run_ranks_outcomes

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),  # about embeddings, which are meant
]

TOKENS = torch.arange(10)[None]


def base_model(*, is_tied: bool = False) -> Any:
    """The same one at each call."""
    return make("tied Llama" if is_tied else "Llama", 0)


def adapted(adapters: tuple[str, ...] = ("default",), *, seed: int = 1, **options: Any) -> Any:
    base = base_model(is_tied="embed_tokens" in options.get("target_modules", ()))
    torch.manual_seed(seed)
    options = {"r": 3, "target_modules": ["q_proj", "v_proj"], **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**options), adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, peft.LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def opened(path: Path | str) -> Any:
    """What transformers loads; every weight of the model is in the files, and nothing else."""
    model, info = transformers.LlamaForCausalLM.from_pretrained(
        path, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def with_adapter(path: Path | str, model: Any, name: str = "default") -> Any:
    base = base_model(is_tied=model.get_base_model().config.tie_word_embeddings)
    return peft.PeftModel.from_pretrained(base, str(path), adapter_name=name)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True},
    "a whole module": {"modules_to_save": ["lm_head"]},
    "tied embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "a task": {"task_type": "CAUSAL_LM"},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_adapters_are_written_as_peft_writes_them(kind: str, tmp_path: Path) -> None:
    model = adapted(**OPTIONS[kind])
    report = export_weights({"model": model, "step": 3}, tmp_path / "ours")
    assert report.files == ("adapter_model.safetensors",)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / one / "adapter_model.safetensors") for one in ("ours", "theirs")
    )
    assert report.num_tensors == len(ours)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    configs = [
        json.loads((tmp_path / one / "adapter_config.json").read_text())
        for one in ("ours", "theirs")
    ]
    for config in configs:
        config["target_modules"].sort()  # a set
    assert configs[0] == configs[1]
    assert torch.equal(logits(with_adapter(tmp_path / "ours", model)), logits(model))


@pytest.mark.parametrize("kind", OPTIONS)
def test_merged_weights_are_those_of_the_base_model(kind: str, tmp_path: Path) -> None:
    model = adapted(**OPTIONS[kind])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = logits(model)
    export_weights(model, tmp_path, merge=True, config=model.config)
    assert torch.allclose(logits(opened(tmp_path)), expected, atol=1e-5)
    # Training goes on with what it had.
    assert torch.equal(logits(model), expected)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.tie_word_embeddings == (kind == "tied embeddings")


@pytest.mark.parametrize("kind", ["two layers", "untied ends", "replicated layers"])
def test_weights_that_transformers_does_not_tie_are_all_written(kind: str, tmp_path: Path) -> None:
    model = base_model(is_tied=kind == "two layers")
    if kind == "two layers":
        first, second = (layer.self_attn.q_proj for layer in model.model.layers)
        second.weight = first.weight
    elif kind == "untied ends":
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        model = adapted(layer_replication=[[0, 2], [1, 2]])
    source = model if kind == "replicated layers" else torch.compile(model)
    options = {"merge": kind == "replicated layers", "config": model.config}
    report = export_weights({"model": source}, tmp_path / "exported", **options)
    declared = {"lm_head.weight": "model.embed_tokens.weight"} if kind == "two layers" else {}
    assert report.tied == declared
    assert torch.allclose(logits(opened(tmp_path / "exported")), logits(model), atol=1e-5)
    if kind != "replicated layers":
        saved, config = tmp_path / "saved", json.loads(model.config.to_json_string())
        remesh.save(source, saved, format="huggingface", metadata=config)
        assert torch.equal(logits(opened(saved)), logits(model))
        names = load_file(saved / "model.safetensors").keys()
        assert names == load_file(tmp_path / "exported" / "model.safetensors").keys()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", OPTIONS)
def test_folders_of_peft_fill_the_adapters(kind: str, safe: bool, tmp_path: Path) -> None:
    model = adapted(**OPTIONS[kind])
    model.save_pretrained(tmp_path, safe_serialization=safe)
    other = adapted(seed=2, **OPTIONS[kind])
    assert not torch.equal(logits(other), logits(model))
    remesh.load(other, tmp_path, unexpected="error")
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("writer", ["ours", "theirs"])
def test_several_adapters(writer: str, tmp_path: Path) -> None:
    model = adapted(("default", "b"))
    if writer == "ours":
        files = export_weights(model, tmp_path).files
        assert files == ("adapter_model.safetensors", "b/adapter_model.safetensors")
    else:
        model.save_pretrained(tmp_path)
    step = tmp_path / "checkpoint-10"  # of the Trainer, in the same folder
    adapted().save_pretrained(step)
    both = adapted(("default", "b"), seed=2)
    remesh.load(both, tmp_path, unexpected="error")
    alone, own_name = adapted(("b",), seed=3), adapted(("sft",), seed=3)
    remesh.load(alone, tmp_path)
    remesh.load(own_name, tmp_path)
    for name, single in (("default", own_name), ("b", alone)):
        model.set_adapter(name)
        both.set_adapter(name)
        folder = tmp_path if name == "default" else tmp_path / name
        for found in (both, single, with_adapter(folder, model, name)):
            assert torch.equal(logits(found), logits(model))
    remesh.load(own_name, step)
    assert torch.equal(logits(own_name), logits(adapted()))
    with pytest.raises(MismatchError, match=r"c\.base_model"):
        remesh.load(adapted(("default", "c")), tmp_path)
    with pytest.raises(StateError, match="adapter b lies in a folder of its own; give the place"):
        export_weights(model, MemoryStorage())


@pytest.mark.parametrize("adapters", [("default",), ("default", "b"), ("b",)])
def test_checkpoints_of_the_trainer(adapters: tuple[str, ...], tmp_path: Path) -> None:
    model, other = adapted(adapters), adapted(adapters, seed=2)
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    remesh.load(torch.compile(other), tmp_path)
    for own, stored in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, stored)
    said = r"^model: is a model of peft.*\nPass the model itself.* by resume_from_checkpoint$"
    with pytest.raises(StateError, match=said):
        remesh.load({"model": other, "optimizer": optimizer}, tmp_path)


def test_adapters_beside_checkpoints_are_not_one_checkpoint(tmp_path: Path) -> None:
    model = adapted(("a", "b"))
    model.save_pretrained(tmp_path)
    remesh.load(adapted(("a", "b"), seed=2), tmp_path, unexpected="error")
    remesh.save({"model": model}, tmp_path / "step_00000001")
    with pytest.raises(CheckpointNotFoundError):
        remesh.load(adapted(("a", "b")), tmp_path)
    assert remesh.Checkpoint(tmp_path / "b").format == "huggingface"


def test_a_checkpoint_of_the_model_is_no_file_of_peft(tmp_path: Path) -> None:
    model = adapted()
    remesh.save(model, tmp_path)
    # It has a name that a file of peft has for a module of this one.
    other = adapted(seed=2, modules_to_save=["lm_head"])
    report = remesh.load(other, tmp_path, missing="keep")
    assert sum("lora_" in name for name in report.restored) == 8
    trained = {name: value for name, value in model.named_parameters() if "lora_" in name}
    assert all(torch.equal(other.get_parameter(name), value) for name, value in trained.items())


def test_training_is_resumed(tmp_path: Path) -> None:
    def training(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = adapted(seed=seed)
        trainable = [one for one in model.parameters() if one.requires_grad]
        return model, torch.optim.AdamW(trainable, lr=1e-2)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def whole(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model, "optimizer": optimizer}

    def small(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
        names = remesh.sharding.LocalNonpersistentObject(model)
        return {"adapter": trainable, "model": names, "optimizer": optimizer}

    first = training(1)
    step(*first)
    kinds = {"whole": whole, "small": small}
    for kind, state in kinds.items():
        remesh.save(state(*first), tmp_path / kind)
    assert not any("base_layer" in name for name in remesh.Checkpoint(tmp_path / "small"))
    expected = [step(*first) for _ in range(3)]
    for kind, state in kinds.items():
        again = training(2)
        remesh.load(state(*again), tmp_path / kind)
        assert [step(*again) for _ in range(3)] == expected


def _sharded(seed: int, options: dict[str, Any]) -> Any:
    model = adapted(seed=seed, **options)
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def _export_and_load(exchange: Exchange, directory: str) -> None:
    for kind, options in OPTIONS.items():
        place = f"{directory}/{kind}"
        model = _sharded(1, options)
        expected = logits(model)
        export_weights(model, f"{place}/adapter")
        export_weights(model, f"{place}/merged", merge=True, config=model.config)
        assert torch.equal(logits(model), expected)
        other = _sharded(2, options)
        remesh.load(other, f"{place}/adapter", unexpected="error")
        assert torch.equal(logits(other), expected)
    cpu = torch.device("cpu")
    wrapped = FullyShardedDataParallel(adapted(), device_id=cpu, use_orig_params=True)
    with pytest.raises(StateError, match="flat parameters"):
        export_weights(wrapped, directory, merge=True)
    with pytest.raises(StateError, match="flat parameters"):
        export_weights(wrapped, directory)


@pytest.mark.filterwarnings("ignore:.*FSDP:FutureWarning")
def test_shards_of_fsdp(tmp_path: Path) -> None:
    run_processes(2, _export_and_load, str(tmp_path))
    for kind, options in OPTIONS.items():
        expected = logits(model := adapted(**options))
        assert torch.equal(logits(with_adapter(tmp_path / kind / "adapter", model)), expected)
        merged = logits(opened(tmp_path / kind / "merged"))
        assert torch.allclose(merged, expected, atol=1e-5)


def load_own(exchange: Exchange, models: list[Any], place: Path) -> None:
    remesh.load(models[exchange.rank], place, group=exchange)


def test_a_model_with_merged_adapters_is_neither_saved_nor_filled(tmp_path: Path) -> None:
    model, merged = adapted(), adapted(seed=2)
    remesh.save({"model": model}, tmp_path / "whole")
    remesh.save(model, tmp_path / "alone")
    model.save_pretrained(tmp_path / "theirs")
    merged.merge_adapter()
    refused = r"(?s)adapters are merged.*model\.unmerge_adapter\(\) before"
    with pytest.raises(StateError, match=refused):
        remesh.load({"model": torch.compile(merged)}, tmp_path / "whole")
    for name in ("alone", "theirs"):
        with pytest.raises(StateError, match=refused):
            remesh.load(merged, tmp_path / name)
        models = [adapted(seed=2), merged]
        for outcome in run_ranks_outcomes(2, load_own, models, tmp_path / name):
            assert isinstance(outcome, Raised)
            assert isinstance(outcome.error, StateError)  # not that the other rank has ended
    for place in (tmp_path / "merged", tmp_path / "whole"):
        with pytest.raises(StateError, match=refused):
            remesh.save({"model": merged}, place, overwrite=True)
    merged.unmerge_adapter()
    remesh.load({"model": merged}, tmp_path / "whole")
    assert torch.equal(logits(merged), logits(model))


def test_a_load_of_the_base_and_one_of_the_whole_name_the_cure(tmp_path: Path) -> None:
    remesh.save(base_model(), tmp_path / "base")
    remesh.save(adapted(), tmp_path / "whole")
    with pytest.raises(MismatchError, match=r"(?s)load it before peft\..*under \.base_layer"):
        remesh.load(adapted(), tmp_path / "base")
    with pytest.raises(MismatchError, match=r"load it into what peft\.get_peft_model returns"):
        remesh.load(base_model(), tmp_path / "whole")


def test_what_cannot_be_exported_names_the_cure(tmp_path: Path) -> None:
    model = adapted()
    remesh.save({"model": model}, tmp_path / "c")
    with pytest.raises(StateError, match=r"(?s): a weight of a peft model.*merge=True"):
        export_weights(tmp_path / "c", tmp_path / "weights")
    with pytest.raises(StateError, match=r"(?s)needs a live model of peft.*Load the checkpoint"):
        export_weights(tmp_path / "c", tmp_path / "weights", merge=True)
    base = model.get_base_model()
    for merge, refused in ((True, "of peft, which knows"), (False, "a weight of a peft model")):
        with pytest.raises(StateError, match=rf"(?s){refused}.*, not its get_base_model\(\)"):
            export_weights(base, tmp_path / "weights", merge=merge)
    with pytest.raises(StateError, match="a weight of a peft model"):
        remesh.save(model, tmp_path / "weights", format="huggingface")
    with pytest.raises(StateError, match="Leave out format='pth'"):
        export_weights(model, tmp_path / "weights", format="pth")
    prompts = peft.get_peft_model(
        base_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(StateError, match=r"(?s)cannot merge.*\nExport the adapters alone"):
        export_weights(prompts, tmp_path / "weights", merge=True)
    assert not (tmp_path / "weights").exists()
    export_weights(prompts, tmp_path / "prompts")
    assert torch.equal(logits(with_adapter(tmp_path / "prompts", prompts)), logits(prompts))
    with pytest.raises(StateError, match=r"(?s)is computed by peft.*model\.load_adapter"):
        remesh.load(prompts, tmp_path / "prompts")
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(StateError, match=r"(?s)model: is a model of peft.*Pass the model itself"):
        remesh.load({"model": model}, tmp_path / "theirs", missing="keep")
    # With names of the caller's choice it is known what they are for.
    export_weights(model, tmp_path / "named", names=lambda name: name)
    assert any("lora_A.default" in name for name in load_file(tmp_path / "named/model.safetensors"))


def _export_merged(exchange: Exchange, models: list[Any], place: Any) -> None:
    export_weights(models[exchange.rank], place, merge=True, group=exchange)


def test_weights_are_not_written_beside_an_adapter(tmp_path: Path) -> None:
    storage = MemoryStorage()
    for place in (tmp_path, storage):
        export_weights(adapted(), place)
        refused = r"adapter_config\.json: (?s:.*)another folder, or remove"
        with pytest.raises(StateError, match=refused):
            export_weights(base_model(), place)
        for outcome in run_ranks_outcomes(2, _export_merged, [adapted(), adapted()], place):
            assert isinstance(outcome, Raised)
            assert isinstance(outcome.error, StateError)
    assert not (tmp_path / "model.safetensors").exists()
    export_weights(adapted(seed=2), tmp_path)  # the adapter may be replaced
    export_weights(base_model(), tmp_path, format="pth")  # which from_pretrained does not read


def _wrapped_inside(kind: str, seed: int = 1) -> Any:
    """A model of which parts are wrapped."""
    model = adapted(seed=seed)
    inner = model.base_model
    if kind == "compiled base":
        inner.model = torch.compile(inner.model)
        return model
    wrap: Any = torch.compile if kind == "compiled blocks" else checkpoint_wrapper
    layers = inner.model.model.layers
    for number in range(1 if kind == "one checkpointed block" else 2):
        layers[number] = wrap(layers[number])
    return model


@pytest.mark.parametrize(
    "kind", ["one checkpointed block", "checkpointed blocks", "compiled blocks", "compiled base"]
)
def test_parts_may_be_wrapped(kind: str, tmp_path: Path) -> None:
    plain, model = adapted(), _wrapped_inside(kind)
    for one in (plain, model):
        place = tmp_path / ("plain" if one is plain else "wrapped")
        assert export_weights(one, place).num_tensors == 8
        export_weights(one, place / "merged", merge=True, config=plain.config)
    for file in ("adapter_model.safetensors", "merged/model.safetensors"):
        ours, expected = (load_file(tmp_path / one / file) for one in ("wrapped", "plain"))
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in ours)
    configs = [tmp_path / one / "adapter_config.json" for one in ("wrapped", "plain")]
    assert len({path.read_bytes() for path in configs}) == 1
    other = _wrapped_inside(kind, seed=2)
    remesh.load(other, tmp_path / "plain", unexpected="error")
    pairs = zip(other.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(own, stored) for own, stored in pairs)


def test_wrappers_are_taken_off(tmp_path: Path) -> None:
    model = adapted()
    export_weights(torch.compile(model), tmp_path / "adapter")
    assert torch.equal(logits(with_adapter(tmp_path / "adapter", model)), logits(model))
    remesh.load(torch.compile(adapted(seed=2)), tmp_path / "adapter")
    compiled = torch.compile(base_model())
    export_weights(compiled, tmp_path / "base", config=base_model().config)
    assert torch.equal(logits(opened(tmp_path / "base")), logits(base_model()))
    # A model that calls a part of it so is none of peft's.
    wrapping = torch.nn.ModuleDict({"base_model": base_model(), "head": torch.nn.Linear(2, 2)})
    export_weights(wrapping, tmp_path / "own")
    # Their names in files of others are refused.
    for prefix in ("_orig_mod.", "module."):
        names = {f"{prefix}{name}": value for name, value in base_model().state_dict().items()}
        torch.save(names, tmp_path / "theirs.pt")
        with pytest.raises(StateError, match=rf"(?s){prefix} is of a wrapper.*Take it off.*names="):
            export_weights(tmp_path / "theirs.pt", tmp_path / "weights", entry=None)
