"""SF505: a module that is used is not registered."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import UnheldLeaves, listed
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.rules.base import Certainty, Findings, Rule, Site

MOST_ITEMS = 1000


class UnregisteredSubmodule(Rule, page=__file__):
    """Leaf of a module called within the root that is not in `root.parameters()`."""

    def setup(self) -> None:
        self.leaves = self.use(UnheldLeaves)
        self.outside: dict[int, tuple[weakref.ref[torch.Tensor], str, str, Site]] = {}
        self.roots: dict[int, set[int]] = {}
        self.entries: dict[int, tuple[str, str, Site]] = {}
        self.contained: set[int] = set()
        """Those of modules that lie with others in a plain list or dict of the model."""
        self.held: dict[int, tuple[str, str, Site]] = {}
        """Those that an optimizer has all the same."""

    def on_submodule_first_called(self, event: ev.SubmoduleFirstCalled) -> None:
        own = [p for p in event.module._parameters.values() if p is not None]
        if not own or len(self.outside) > 10_000:
            return
        key = self.trace.module_key(event.root)
        inside = self.roots.get(key)
        if inside is None or not all(id(p) in inside for p in own):
            # Built anew: submodules may have been added since.
            inside = self.roots[key] = {
                id(p) for p in (*parameters_of(event.root), *event.root.parameters())
            }
        names = type(event.module).__name__, type(event.root).__name__
        if not all(id(p) in inside for p in own) and _is_in_plain_container(
            event.root, event.module
        ):
            self.contained |= {id(p) for p in own}
        for parameter in own:
            if id(parameter) not in inside and parameter.is_leaf:
                self.outside[id(parameter)] = weakref.ref(parameter), *names, event.site

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if event.walk and self.outside:
            self._look_at_held(event)
            for leaf in event.leaves:
                entry = self.outside.get(id(leaf))
                known = self.leaves.known.get(id(leaf))
                if entry is not None and entry[0]() is leaf and known is not None:
                    self.entries[id(known)] = entry[1:]

    def _look_at_held(self, event: ev.BackwardBegin) -> None:
        for leaf in event.leaves:
            entry = self.outside.get(id(leaf))
            if entry is None or entry[0]() is not leaf or id(leaf) in self.held:
                continue
            # One module in a list is borrowed from elsewhere on purpose; several are layers.
            if id(leaf) not in self.contained or self.trace.parameters.find(leaf) is None:
                continue
            if not self._is_registered(leaf):
                self.held[id(leaf)] = entry[1:]

    def _is_registered(self, leaf: torch.Tensor) -> bool:
        """Whether some other model that was called has it: a part that several models use."""
        models = self.trace.names.models()
        return any(leaf is parameter for model in models for parameter in parameters_of(model))

    def findings(self) -> Findings:
        if self.held:
            _, root, site = next(iter(self.held.values()))
            kinds = sorted({kind for kind, _, _ in self.held.values()})
            message = (
                f"{len(self.held)} parameters of modules called in {root}.forward"
                f" ({listed(kinds)}) are not parameters of {root}. An optimizer has them, but"
                " state_dict(), to() and train() do not reach them."
            )
            yield self.report(
                message,
                site,
                certainty=Certainty.STRONG,
                parameters=len(self.held),
                modules=kinds,
                root=root,
            )
        leaves = self.leaves.forgotten()
        found = [self.entries[id(leaf)] for leaf in leaves if id(leaf) in self.entries]
        if not found:
            return
        _, root, site = found[0]
        kinds = sorted({kind for kind, _, _ in found})
        message = (
            f"{len(found)} parameters of modules called in {root}.forward ({listed(kinds)}) are"
            f" not parameters of {root}: no optimizer has them and they never changed."
        )
        yield self.report(message, site, parameters=len(found), modules=kinds, root=root)


def _is_in_plain_container(root: nn.Module, module: nn.Module) -> bool:
    for owner in root.modules():
        for value in vars(owner).values():
            items = value.values() if isinstance(value, dict) else value
            if not isinstance(value, dict | list | tuple) or len(value) > MOST_ITEMS:
                continue
            modules = [item for item in items if isinstance(item, nn.Module)]
            parts = (part for item in modules for part in item.modules())
            if len(modules) > 1 and value is not owner._modules and any(p is module for p in parts):
                return True
    return False
