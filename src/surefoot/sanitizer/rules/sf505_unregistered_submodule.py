"""SF505: a module that is used is not registered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.coverage import Leaves, listed
from surefoot.sanitizer.trace import Trace


class UnregisteredSubmodule(Rule):
    """Leaf of a module called within the root that is not in `root.parameters()`."""

    info = RuleInfo(
        code="SF505",
        slug="unregistered-submodule",
        certainty=Certainty.PROOF,
        title="A module is called in forward() but not registered, so it is never trained.",
        observes="Parameters of a module called inside a root module's forward that are not among"
        " the root's parameters, get gradients, are in no optimizer and never change.",
        why="model.parameters(), .to(), state_dict() and eval() do not reach it: it stays at its"
        " initial values and is not saved.",
        example="self.hidden = [nn.Linear(8, 8) for _ in range(3)]",
        fix="Use nn.ModuleList or nn.ModuleDict.",
        source="torch.nn.ModuleList",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.leaves = Leaves(trace)
        self.outside: dict[int, tuple[weakref.ref[torch.Tensor], str, str, Site]] = {}
        self.roots: dict[int, set[int]] = {}
        self.entries: dict[int, tuple[str, str, Site]] = {}

    def on_submodule_first_called(self, event: ev.SubmoduleFirstCalled) -> None:
        own = [p for p in event.module._parameters.values() if p is not None]
        if not own or len(self.outside) > 10_000:
            return
        key = self.trace.module_key(event.root)
        inside = self.roots.get(key)
        if inside is None or not all(id(p) in inside for p in own):
            # Built anew: submodules may have been added since.
            inside = self.roots[key] = {id(p) for p in event.root.parameters()}
        names = type(event.module).__name__, type(event.root).__name__
        for parameter in own:
            if id(parameter) not in inside and parameter.is_leaf:
                self.outside[id(parameter)] = weakref.ref(parameter), *names, event.site

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if event.walk and self.outside:
            self.leaves.see([t for t in event.leaves if id(t) in self.outside], event.site)
            for leaf in event.leaves:
                entry = self.outside.get(id(leaf))
                known = self.leaves.known.get(id(leaf))
                if entry is not None and entry[0]() is leaf and known is not None:
                    self.entries[id(known)] = entry[1:]

    def findings(self) -> Iterable[Finding]:
        leaves = self.leaves.forgotten()
        found = [self.entries[id(leaf)] for leaf in leaves if id(leaf) in self.entries]
        if not found:
            return
        _, root, site = found[0]
        kinds = sorted({kind for kind, _, _ in found})
        yield self.report(
            f"{len(found)} parameters of modules called in {root}.forward ({listed(kinds)}) are"
            f" not parameters of {root}: no optimizer has them and they never changed.",
            site,
            evidence={"parameters": len(found), "modules": kinds, "root": root},
        )
