"""The sources of a transformation, as statements see them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from remesh.transform import messages
from remesh.transform.expressions import Leaf
from remesh.transform.optimizer_state import States
from remesh.transform.tensor_info import Infos, TensorInfo


class Sources:
    """The sources by name, and the parameters of which only optimizer states are sources."""

    def __init__(self, infos: Infos, states: States, aliases: Mapping[str, str]) -> None:
        self.infos = infos
        self.states = states
        self._leaves: dict[str, Leaf | None] = {}
        self._groups: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self._groups.setdefault(name, [name]).append(alias)
        self._groups.update({alias: self._groups[name] for alias, name in aliases.items()})

    def leaf(self, name: str) -> Leaf | None:
        """The source of this name, or the parameter of this name of which only states exist."""
        if name not in self._leaves:
            self._leaves[name] = self._make_leaf(name)
        return self._leaves[name]

    def _make_leaf(self, name: str) -> Leaf | None:
        if name in self.infos:
            info = self.infos[name]
            return Leaf(info.shape, info.dtype, 0, name) if info else Leaf((), None, 0, name)
        if name in self.states.by_parameter:
            return Leaf(self.info(name).shape, None, 0, name)
        return None

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a source, or of a parameter as its states show them."""
        info = self.infos.get(name)
        if info is not None:
            return info
        return info_from_states(name, self.states, self.infos) or TensorInfo("", ())

    def nearest(self, name: str) -> list[str]:
        """A hint with similar names, if there are any."""
        return messages.nearest(name, [*self.infos, *self.states.by_parameter])

    def names_of(self, name: str) -> list[str]:
        """A name and the others that its tensor has."""
        group = self._groups.get(name)
        return [name] if group is None else sorted(group, key=lambda other: other != name)


def info_from_states(parameter: str, states: States, infos: Infos) -> TensorInfo | None:
    """Dtype and shape of a parameter as its largest state shows them."""
    found = [
        info
        for names in states.by_parameter.get(parameter, {}).values()
        for name in names
        if (info := infos.get(name)) is not None
    ]
    return max(found, key=lambda info: math.prod(info.shape), default=None)
