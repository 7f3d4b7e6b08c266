"""Options of Flex Checkpoint that are the same for all its functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remesh.errors import StateError
from remesh.exchange import Exchange
from remesh.transform import Transform

_AOA_KEYS = frozenset({"aoa_statements", "aoa_config_reverse", "enable_traceback"})


def transform_of(aoa_config: Mapping[str, Any] | None) -> Transform | None:
    """The transformation that an AOA configuration asks for; None if it has no statements.

    `enable_traceback` may stand there and says nothing new: errors always show what each macro of
    a statement made of it.
    """
    config = aoa_config or {}
    unknown = sorted(config.keys() - _AOA_KEYS)
    if unknown:
        raise StateError(
            f"aoa_config has no {', '.join(unknown)}; it may have {', '.join(sorted(_AOA_KEYS))}"
        )
    statements = config.get("aoa_statements")
    if not statements:
        return None
    transform = Transform(statements)
    return transform.reversed() if config.get("aoa_config_reverse") else transform


def check_coordinator(exchange: Exchange, coordinator_rank: int | None) -> None:
    """Check that a coordinator is a rank of the group.

    Which rank it is makes no difference: ranks that disagree about a value are an error, so there
    is nothing that one of them decides alone.
    """
    if coordinator_rank is not None and not 0 <= coordinator_rank < exchange.world_size:
        raise StateError(
            f"coordinator_rank={coordinator_rank} is not a rank of a group of {exchange.world_size}"
        )
