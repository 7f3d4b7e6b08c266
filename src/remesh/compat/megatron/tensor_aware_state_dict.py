"""A sharded state dict with its tensors apart, for checkpoints in the memory or on disks of nodes.

NVIDIA's resiliency extension keeps local checkpoints: it takes the tensors out of such a state
dict, writes or sends them, and puts them in again. What it holds is the common state, and the
sharded part with the data of the shards. Fully parallel, each shard is kept by one rank of a group,
and the ranks pass the shards on when the state dict is made again.

The class also works where the extension is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.dict_utils import (
    dict_list_map_outplace,
    merge,
    nested_values,
)
from remesh.compat.megatron.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
)
from remesh.compat.megatron.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
)
from remesh.compat.megatron.state_dict_utils import load_preprocess, save_preprocess
from remesh.compat.megatron.utils import (
    ShardId,
    _sharded_object_id,
    _sharded_tensor_shard_id,
    extract_sharded_base,
)
from remesh.compat.megatron.validation import (
    StrictHandling,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
)

try:
    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
except ImportError:
    TensorAwareStateDict = object


class LocalStateError(CheckpointingException, AssertionError):
    """A part that a local checkpoint does not hold; Megatron asserts that it does."""


@dataclass
class MCoreTensorAwareStateDict(TensorAwareStateDict):  # type: ignore[misc]
    """A sharded state dict whose tensors can be taken out and put in again."""

    common: Any  # the common state
    sharded_state_dict: Any  # the sharded part; shards that another rank keeps have no data
    _is_hollow: bool = False
    _devices: dict[int, str] = field(default_factory=dict)
    """Number of a shard → device that its tensor came from, while it is out or on another one."""

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: Any,
        algo: str = "fully_parallel",
        parallelization_group: Any = None,
        cached_metadata: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution | None]:
        """Take a sharded state dict. Collective.

        Args:
            sharded_state_dict: Factories in it are replaced by what they build, in place.
            algo: `fully_parallel`: each shard is kept by one rank of the group. `atomic`: each rank
                keeps its own.
            parallelization_group: The ranks that share; by default all.
            cached_metadata: The distribution of an earlier state dict of the same structure.

        Returns:
            The state dict, and the distribution to hand in the next time.

        Raises:
            NotImplementedError: If `algo` is another one.
            CheckpointingException: On every rank, if ranks do not fit together.
        """
        fully_parallel = _is_fully_parallel(algo)
        sharded, common = save_preprocess(sharded_state_dict, cached_metadata is None)
        distribution = cached_metadata
        if fully_parallel and distribution is None:
            distribution = determine_main_replica_uniform_distribution(
                sharded, parallelization_group, ignore_groups=True
            )
        if fully_parallel and distribution is not None:
            rank = exchange_of(parallelization_group).rank
            for leaf in nested_values(sharded):
                if isinstance(leaf, ShardedTensor):
                    keeper = distribution.main_rank_for_shard[_sharded_tensor_shard_id(leaf)]
                    leaf.data = leaf.data if keeper == rank else None
        return cls(common, sharded), distribution if fully_parallel else None

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors are taken out."""
        return self._is_hollow

    @property
    def common_state_dict(self) -> Any:
        """The common state."""
        return self.common

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that this rank keeps."""
        self._require(hollow=False)
        return (tensor.data for _, tensor in self._kept() if tensor.data is not None)

    def _shards(self) -> list[ShardedTensor]:
        leaves = nested_values(self.sharded_state_dict)
        return [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]

    def _kept(self) -> list[tuple[int, ShardedTensor]]:
        """The shards of which this rank keeps the tensor, or kept it before it was taken out."""
        return [
            (number, shard)
            for number, shard in enumerate(self._shards())
            if (number in self._devices if self._is_hollow else shard.data is not None)
        ]

    def _require(self, *, hollow: bool) -> None:
        if self._is_hollow != hollow:
            raise CheckpointingException(
                "the tensors of this state dict are not taken out; call pop_tensors first"
                if hollow
                else "the tensors of this state dict are taken out; call insert_tensors first"
            )

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out; the descriptions stay."""
        self._require(hollow=False)
        taken = []
        for number, shard in self._kept():
            assert shard.data is not None
            taken.append(shard.data)
            self._devices[number] = shard.data.device.type
            shard.data = None
        self._is_hollow = True
        return taken

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in, in the order in which `pop_tensors` gave them; on any device."""
        self._require(hollow=True)
        for (number, shard), tensor in zip(self._kept(), tensor_data, strict=True):
            shard.data = tensor
            if tensor.device.type == self._devices[number]:
                del self._devices[number]
        self._is_hollow = False

    def init_tensors(self) -> None:
        """Put empty tensors in, like those that were taken out."""
        self._require(hollow=True)
        for number, shard in self._kept():
            shard.init_data(self._devices.pop(number))
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU; `restore_tensor_device` moves them back."""
        self._require(hollow=False)
        for number, shard in self._kept():
            assert shard.data is not None
            if shard.data.device.type != "cpu":
                self._devices.setdefault(number, shard.data.device.type)
                shard.data = shard.data.detach().to("cpu", non_blocking=non_blocking)
            elif number not in self._devices:
                shard.data = shard.data.detach().clone()

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors to the devices that they came from."""
        self._require(hollow=False)
        for number, shard in self._kept():
            if number in self._devices:
                assert shard.data is not None
                shard.data = shard.data.to(self._devices.pop(number), non_blocking=non_blocking)

    def to_state_dict(  # noqa: PLR0917 - the order is Megatron's
        self,
        sharded_state_dict: Any,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: Any = None,
        strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
    ) -> Any:
        """Make a state dict again, as `load` would. Collective.

        Args:
            sharded_state_dict: What this rank asks for: the layout that was taken.
            algo: As for `from_state_dict`.
            exchange_algo: See `exchange_by_distribution`.
            validate_access_integrity: See `load`.
            parallelization_group: The ranks that share; by default all.
            strict: What to log or return, see `load`, or to raise before anything else is done.
            return_mismatch_keys: Return missing and unexpected keys beside the state dict.

        Raises:
            LocalStateError: If something is asked for that is not here, for every `strict`: a local
                checkpoint holds one layout.
            CheckpointingException: On every rank, if `strict` makes mismatches errors, or ranks do
                not fit together.
        """
        self._require(hollow=False)
        fully_parallel = _is_fully_parallel(algo)
        result = dict_list_map_outplace(lambda leaf: leaf, self.common)
        if not sharded_state_dict:
            return result
        asked, local, factories = load_preprocess(sharded_state_dict)
        merge(result, local)
        asked, _ = extract_sharded_base(asked)
        handling = parse_strict_flag(strict)
        mine = of_all = None
        if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
            mine, of_all = determine_global_metadata(asked)
        stored = {leaf.key: leaf.without_data() for leaf in nested_values(self.sharded_state_dict)}
        _, missing, unexpected = validate_integrity_and_strict_load(
            asked, handling, validate_access_integrity, mine, of_all, stored
        )
        tensors = self._tensors_for(asked, fully_parallel, parallelization_group, exchange_algo)
        merge(result, apply_factory_merges(self._filled(asked, tensors), factories))
        return (result, missing, unexpected) if return_mismatch_keys else result

    def _tensors_for(
        self, asked: Any, fully_parallel: bool, group: Any, exchange_algo: str
    ) -> dict[ShardId, torch.Tensor]:
        """The tensors that this rank keeps, and those that others pass on to it."""
        kept = {
            _sharded_tensor_shard_id(shard): shard.data
            for _, shard in self._kept()
            if shard.data is not None
        }
        if not fully_parallel:
            return kept
        distribution = determine_main_replica_uniform_distribution(asked, group, True)
        if distribution is None:
            return kept
        lacking = {
            _sharded_tensor_shard_id(leaf): leaf
            for leaf in nested_values(asked)
            if isinstance(leaf, ShardedTensor) and _sharded_tensor_shard_id(leaf) not in kept
        }
        return exchange_by_distribution(kept, lacking, distribution, group, exchange_algo)

    def _filled(self, asked: Any, tensors: dict[ShardId, torch.Tensor]) -> Any:
        objects = {
            _sharded_object_id(leaf): leaf.data
            for leaf in nested_values(self.sharded_state_dict)
            if isinstance(leaf, ShardedObject)
        }

        def fill(leaf: ShardedBase) -> Any:
            try:
                if isinstance(leaf, ShardedTensor):
                    return tensors[_sharded_tensor_shard_id(leaf)]
                assert isinstance(leaf, ShardedObject)
                return objects[_sharded_object_id(leaf)]
            except KeyError as error:
                raise LocalStateError(
                    f"{leaf.key}: this part is not in the local checkpoint, which loads in the "
                    "layout that it was saved in; for another layout load a global checkpoint"
                ) from error

        return dict_list_map_outplace(fill, asked)


def _is_fully_parallel(algo: str) -> bool:
    if algo not in {"atomic", "fully_parallel"}:
        raise NotImplementedError(f"algo={algo!r} is neither 'atomic' nor 'fully_parallel'")
    return algo == "fully_parallel"
