"""What the rules about one loss function share: a look at few of its calls at each place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers.sequences import MOST_LOOKS, RecentIds
from surefoot.sanitizer.rules.base import Finding, Findings, Looks, Rule, Site, look_now

MOST_CALLS = 32
"""Calls of a place among which some are found that tell something."""
LEAST_LOOKS = 3
"""Fewer calls than this prove nothing."""
SOFTMAX = ("Softmax", "SafeSoftmax")
TOKEN_LOSSES = ("cross_entropy", "nll_loss")


class LossRule(Rule, ABC):
    """Looks at a few calls of some loss functions; speaks where all that it saw are wrong."""

    losses: ClassVar[tuple[str, ...]]
    """Names in `torch.nn.functional`."""
    in_training: ClassVar[bool] = True
    """Whether calls under `no_grad` are left out."""

    def setup(self) -> None:
        self.looks = Looks[Site]()

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name in self.losses and (event.grad_enabled or not self.in_training):
            verdict = self.is_wrong(event) if self.looks_at(event) else None
            if verdict is not None:
                self.looks.add(event.site, verdict)

    def looks_at(self, event: ev.LossCalled) -> bool:
        """Whether this call is one of those that are looked at."""
        return look_now(event.call)

    @abstractmethod
    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        """Whether a call is wrong; None where it cannot be told."""

    @abstractmethod
    def describe(self, site: Site, count: int) -> Finding | None:
        """What there is to say of a place where all of `count` calls were wrong."""

    def findings(self) -> Findings:
        for site, count, _ in self.looks.often(LEAST_LOOKS):
            finding = self.describe(site, count)
            if finding is not None:
                yield finding


class TokenLossRule(LossRule, ABC):
    """A `LossRule` that compares targets with the ids that were embedded for the same forward."""

    losses = TOKEN_LOSSES
    in_training = False

    def setup(self) -> None:
        super().setup()
        self.recent = self.use(RecentIds)

    def looks_at(self, event: ev.LossCalled) -> bool:
        return event.call <= MOST_CALLS and self.looks.all[event.site] < MOST_LOOKS


def comes_from(values: torch.Tensor, kinds: tuple[str, ...]) -> bool:
    """Whether a tensor, seen through views, is the output of a node of one of these kinds."""
    node = graph.through_views(values.grad_fn)
    return node is not None and graph.kind(node) in kinds


def directions(module: nn.Module) -> set[bool]:
    """Whether its recurrent layers are bidirectional; empty without any."""
    return {m.bidirectional for m in module.modules() if isinstance(m, nn.RNNBase)}
