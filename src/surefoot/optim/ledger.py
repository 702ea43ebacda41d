"""The parameter ledger: assigns each trainable tensor to exactly one group, with the reason.

Two rules for weight decay always run, by dimension and by name and type; one decides, and the
other's answer is recorded. Every disagreement is reported, frozen parameters are not listed, and
tied ones are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from torch import Tensor, nn

from surefoot.core.errors import ModelError, RequestError
from surefoot.optim.decay_rules import (
    OwnedTensor,
    by_dimension,
    by_name,
    is_embedding,
    named_trainable,
    trainable_tensors,
)

DecayRule = Literal["dimension", "name"]
Decider = Literal["dimension", "name", "embeddings", "override"]

AS_OPTIMIZER: Final = "as-optimizer"
"""Weight decay of an override that leaves the decision to the rule."""

DECAY: Final = "decay"
NO_DECAY: Final = "no_decay"
MAX_NAMED: Final = 5
"""Number of names that an error lists before it counts the rest."""


@dataclass(frozen=True, slots=True)
class GroupOverride:
    """Another rate or decay for parameters whose full name matches a pattern.

    Args:
        pattern: glob pattern on the full dotted name: `head.*`, `*.bias`, `blocks.0.*`.
        lr_multiplier: factor on the learning rate, >= 0.
        weight_decay: decay of every matching parameter, whatever the rule says; `as-optimizer`
            leaves it to the rule.

    Raises:
        RequestError: a number is negative or not finite.
    """

    pattern: str
    lr_multiplier: float = 1.0
    weight_decay: float | Literal["as-optimizer"] = AS_OPTIMIZER

    def __post_init__(self) -> None:
        _not_negative(self.lr_multiplier, f"lr_multiplier of '{self.pattern}'")
        if self.weight_decay != AS_OPTIMIZER:
            _not_negative(self.weight_decay, f"weight_decay of '{self.pattern}'")


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One trainable tensor: its group, and why."""

    name: str
    aliases: tuple[str, ...]
    """Other names of the same tensor (tied weights, shared modules)."""
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    group: str
    weight_decay: float
    lr_multiplier: float
    decided_by: Decider
    """What decided its weight decay."""
    reason: str
    by_dimension: bool
    """Whether the rule by dimension decays it."""
    by_name: bool
    """Whether the rule by name and type decays it."""
    name_reason: str
    """Reason of the rule by name and type."""

    @property
    def rules_agree(self) -> bool:
        return self.by_dimension == self.by_name


class ParameterLedger:
    """The group of each trainable tensor, and why. Create it with `build`."""

    def __init__(
        self, rows: Sequence[LedgerRow], parameters: Sequence[nn.Parameter], rule: DecayRule
    ) -> None:
        self.rows = tuple(rows)
        self.parameters = tuple(parameters)
        """One per row, in model order."""
        self.rule = rule

    @classmethod
    def build(
        cls,
        model: nn.Module,
        *,
        weight_decay: float,
        rule: DecayRule = "dimension",
        decay_embeddings: bool = True,
        overrides: Sequence[GroupOverride] = (),
        elsewhere: Collection[str] = (),
    ) -> ParameterLedger:
        """Assigns each trainable parameter of `model`.

        Args:
            model: the model, possibly wrapped; prefixes of wrappers are removed from the names.
            weight_decay: of the tensors that decay, >= 0.
            rule: the rule that decides. `dimension`: tensors of two or more dims decay. `name`: all
                decay except norms (by type), biases and what the model excludes.
            decay_embeddings: False excludes embeddings from decay under either rule.
            overrides: rates and decays by name; at most one may match a parameter.
            elsewhere: names of parameters on other ranks, which overrides may match, too.

        Raises:
            ModelError: the model has no trainable parameter, or one cannot be trained.
            RequestError: an override matches nothing, two match one parameter, or the decay is
                negative.
        """
        _not_negative(weight_decay, "weight_decay")
        rows, parameters = [], []
        matched: set[str] = set()
        for tensor in trainable_tensors(model):
            override = _matching(tensor.name, overrides)
            if override is not None:
                matched.add(override.pattern)
            rows.append(_row(tensor, rule, weight_decay, decay_embeddings, override))
            parameters.append(tensor.parameter)
        if not rows:
            raise ModelError(
                "the model has no trainable parameter",
                where=type(model).__name__,
                rule="an optimizer needs at least one parameter with requires_grad",
                remedy="unfreeze a part of the model",
            )
        matched |= {o.pattern for o in overrides for n in elsewhere if fnmatchcase(n, o.pattern)}
        _refuse_idle(overrides, matched, [row.name for row in rows])
        return cls(rows, parameters, rule)

    @property
    def disagreements(self) -> tuple[LedgerRow, ...]:
        """Tensors that one rule would decay and the other would not."""
        return tuple(row for row in self.rows if not row.rules_agree)

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups for a torch optimizer, in order of first appearance.

        Each has `params` and `weight_decay` for torch, and `name`, `parameter_names` and
        `lr_multiplier` for us. Each call returns separate lists of the same tensors.
        """
        groups: dict[str, dict[str, Any]] = {}
        for row, parameter in zip(self.rows, self.parameters, strict=True):
            group = groups.setdefault(
                row.group,
                {
                    "params": [],
                    "weight_decay": row.weight_decay,
                    "name": row.group,
                    "parameter_names": [],
                    "lr_multiplier": row.lr_multiplier,
                },
            )
            group["params"].append(parameter)
            group["parameter_names"].append(row.name)
        return list(groups.values())


def _matching(name: str, overrides: Sequence[GroupOverride]) -> GroupOverride | None:
    found = [override for override in overrides if fnmatchcase(name, override.pattern)]
    if len(found) > 1:
        raise RequestError(
            f"parameter {name} matches {len(found)} group overrides: "
            + ", ".join(f"'{override.pattern}'" for override in found),
            where="optimizer.groups",
            rule="each trainable parameter is in exactly one group",
            remedy="narrow the patterns so that only one matches",
        )
    return found[0] if found else None


def _refuse_idle(
    overrides: Sequence[GroupOverride], matched: set[str], names: Sequence[str]
) -> None:
    idle = [override.pattern for override in overrides if override.pattern not in matched]
    if idle:
        raise RequestError(
            f"no trainable parameter matches {', '.join(map(repr, idle))}",
            where="optimizer.groups",
            rule="a group override matches at least one parameter",
            remedy=f"names look like {', '.join(names[:3])}; `surefoot show params` lists all",
        )


def _row(
    tensor: OwnedTensor,
    rule: DecayRule,
    weight_decay: float,
    decay_embeddings: bool,
    override: GroupOverride | None,
) -> LedgerRow:
    dimension, name = by_dimension(tensor), by_name(tensor)
    opinion = dimension if rule == "dimension" else name
    decays, reason = opinion.decays, opinion.reason
    decided_by: Decider = rule
    if not decay_embeddings and is_embedding(tensor):
        decays, reason, decided_by = False, "an embedding; decay_embeddings is off", "embeddings"
    group = DECAY if decays else NO_DECAY
    decay, lr_multiplier = (weight_decay if decays else 0.0), 1.0
    if override is not None:
        lr_multiplier = override.lr_multiplier
        group = f"{override.pattern} {group}"
        if override.weight_decay != AS_OPTIMIZER:
            decay, group, decided_by = float(override.weight_decay), override.pattern, "override"
            reason = f"matches '{override.pattern}'"
    parameter = tensor.parameter
    return LedgerRow(
        name=tensor.name,
        aliases=tensor.aliases,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        num_elements=parameter.numel(),
        group=group,
        weight_decay=decay,
        lr_multiplier=lr_multiplier,
        decided_by=decided_by,
        reason=reason,
        by_dimension=dimension.decays,
        by_name=name.decays,
        name_reason=name.reason,
    )


def check_groups(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Checks the parameter groups of any torch optimizer against `model`.

    Raises:
        ModelError: a trainable parameter is in no group or in two, or a frozen or foreign tensor is
            in one.
    """
    names = {id(p): name for name, p in named_trainable(model).items()}
    counts = dict.fromkeys(names, 0)
    problems = []
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) in counts:
                counts[id(parameter)] += 1
            else:
                problems.append(_stranger(parameter))
    problems += [
        f"{names[key]} is in {'no group' if count == 0 else f'{count} groups'}"
        for key, count in counts.items()
        if count != 1
    ]
    if problems:
        raise ModelError(
            f"the optimizer's groups do not fit the model: {len(problems)} problems",
            where=first_few(problems),
            rule="each trainable parameter is in exactly one group, and no other tensor is",
            remedy="build the groups with ParameterLedger.build(model, ...).groups()",
        )


def name_groups(model: nn.Module, optimizer_groups: Sequence[dict[str, Any]]) -> None:
    """Adds the names that `UpdateOptimizer` needs to the groups of any torch optimizer.

    Sets `name` (`group 0`, ...) and `parameter_names` if missing.

    Raises:
        ModelError: the groups do not fit the model.
    """
    check_groups(model, optimizer_groups)
    names = {id(p): name for name, p in named_trainable(model).items()}
    for index, group in enumerate(optimizer_groups):
        group.setdefault("name", f"group {index}")
        group["parameter_names"] = [names[id(p)] for p in group["params"]]


def mixed_decay_groups(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Groups whose weight decay applies to both matrices and norms or biases.

    Returns:
        A sentence for each such group.
    """
    found = []
    for index, group in enumerate(groups):
        dims = [p.dim() for p in group["params"]]
        if group.get("weight_decay", 0.0) > 0 and min(dims) < 2 <= max(dims):
            low = sum(d < 2 for d in dims)
            found.append(
                f"{group.get('name', f'group {index}')}: weight decay "
                f"{group['weight_decay']:g} also applies to {low} tensors of fewer than 2 dims "
                "(norm scales, biases)"
            )
    return found


def first_few(texts: Sequence[str]) -> str:
    """The first few texts, and how many more there are."""
    more = len(texts) - MAX_NAMED
    return "; ".join(texts[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _stranger(parameter: Tensor) -> str:
    kind = "not of this model" if parameter.requires_grad else "frozen"
    return f"a tensor of shape {tuple(parameter.shape)} is {kind}"


def _not_negative(value: float, what: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise RequestError(
            f"{what} is {value}",
            where=what,
            rule="finite and not negative",
            remedy="0 turns it off",
        )
