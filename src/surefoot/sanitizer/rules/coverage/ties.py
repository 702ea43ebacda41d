"""Parameters that two modules share, and whether they still do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.listener import Listener

MOST_TIES = 256


@dataclass
class _Holder:
    module: weakref.ref[nn.Module]
    name: str
    kind: str

    def tensor(self, present: set[int]) -> torch.Tensor | None:
        """What it holds, while it is part of a model that is called."""
        module = self.module()
        if module is None or id(module) not in present:
            return None
        return module._parameters.get(self.name)


@dataclass
class _Tie:
    holders: tuple[_Holder, _Holder]
    site: Site
    roots: set[int] = field(default_factory=set)
    """Keys of the models in which both holders were seen."""
    broken: bool = False


class Ties(Listener):
    """Follows shared parameters from where they are shared."""

    def setup(self) -> None:
        self._ties: list[_Tie] = []

    def on_parameter_shared(self, event: ev.ParameterShared) -> None:
        if event.tensor.dim() != 2 or len(self._ties) >= MOST_TIES:
            return
        one, two = (
            _Holder(weakref.ref(module), name, type(module).__name__)
            for module, name in event.holders
        )
        self._ties.append(_Tie((one, two), event.site))

    def broken(
        self, leaves: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Site]]:
        """Pairs of weights in one graph that were one weight, or took the place of one."""
        open_ties = [tie for tie in self._ties if not tie.broken]
        if not open_ties:
            return
        reached = {id(leaf) for leaf in leaves}
        found = self.trace.names.models()
        models = {self.trace.module_key(module): list(module.modules()) for module in found}
        present = {id(module) for parts in models.values() for module in parts}
        for tie in open_ties:
            for key, parts in models.items():
                inside = {id(module) for module in parts}
                if all(id(h.module()) in inside for h in tie.holders):
                    tie.roots.add(key)
            pair = self._pair(tie, present, models)
            if pair is not None and all(id(tensor) in reached for tensor in pair):
                tie.broken = True
                yield *pair, tie.site

    def _pair(
        self, tie: _Tie, present: set[int], models: dict[int, list[nn.Module]]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        one, two = (holder.tensor(present) for holder in tie.holders)
        if one is not None and two is not None:
            return None if one is two else (one, two)
        if one is None and two is None:
            # Both were replaced in a model that is still there.
            parts = [m for key in tie.roots & models.keys() for m in models[key]]
            one = _successor(tie.holders[0].kind, parts, None)
            two = None if one is None else _successor(tie.holders[1].kind, parts, one)
        else:
            parts = [module for module_list in models.values() for module in module_list]
            kept = two if one is None else one
            gone = tie.holders[0 if one is None else 1]
            one, two = kept, _successor(gone.kind, parts, kept)
        return None if one is None or two is None else (one, two)


def _successor(
    kind: str, parts: Sequence[nn.Module], other: torch.Tensor | None
) -> torch.Tensor | None:
    """The weight of a module of that kind, of the shape of the other one."""
    for module in parts:
        tensor = module._parameters.get("weight") if type(module).__name__ == kind else None
        if tensor is None or tensor is other or tensor.dim() != 2:
            continue
        if other is None or tensor.shape == other.shape:
            return tensor
    return None
