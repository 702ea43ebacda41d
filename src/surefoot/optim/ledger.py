"""The parameter ledger: each trainable tensor in exactly one group, and the rule that put it there.

Two rules for weight decay always run, by dimension and by name and type; one decides and what the
other would have said is kept beside it. It never leaves a disagreement unsaid, never lists a frozen
parameter and never counts a tied one twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from torch import Tensor, nn

from surefoot.core.errors import ModelError, RequestError

DecayRule = Literal["dimension", "name"]
Decider = Literal["dimension", "name", "embeddings", "override"]

INHERIT: Final = "inherit"
"""An override's weight decay that leaves the decision to the rule."""

DECAY: Final = "decay"
NO_DECAY: Final = "no_decay"

_WRAPPERS: Final = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?:\.|$)"
)
# The patterns that HF Trainer excludes, and `ln_1`-like names, which those miss.
_UNDECAYED_NAMES: Final = (
    ("bias", re.compile(r"bias")),
    ("layernorm", re.compile(r"layernorm")),
    ("rmsnorm", re.compile(r"rmsnorm")),
    ("norm", re.compile(r"(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)norm\d*(?:$|\.)")),
    ("ln", re.compile(r"(?:^|\.)ln(?:_?[a-z0-9]+)?(?:$|\.)")),
)
_NORM_TYPES: Final = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)
_EMBEDDING_TYPES: Final = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class GroupOverride:
    """Another rate or decay for the parameters whose full name matches a pattern.

    Args:
        pattern: shell-like pattern on the dotted name: `head.*`, `*.bias`, `blocks.0.*`.
        lr_multiplier: factor on the learning rate of the run.
        weight_decay: decay of every parameter that matches, whatever the rule says; `inherit`
            leaves it to the rule.
    """

    pattern: str
    lr_multiplier: float = 1.0
    weight_decay: float | Literal["inherit"] = INHERIT


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One trainable tensor."""

    name: str
    aliases: tuple[str, ...]
    """Other names of the same tensor (tied weights)."""
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    group: str
    weight_decay: float
    lr_multiplier: float
    decided_by: Decider
    reason: str
    by_dimension: bool
    """Whether the rule by dimension would decay it."""
    by_name: bool
    """Whether the rule by name and type would."""
    name_reason: str

    @property
    def rules_agree(self) -> bool:
        return self.by_dimension == self.by_name


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes that compile, recompute and FSDP wrappers add."""
    return _WRAPPERS.sub("", name)


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Plain name to trainable parameter, each tensor once, in the order of the model."""
    return {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


class ParameterLedger:
    """Which trainable tensor is in which group, and why. Build it with `build`."""

    def __init__(
        self, rows: Sequence[LedgerRow], parameters: Sequence[nn.Parameter], rule: DecayRule
    ) -> None:
        self.rows = tuple(rows)
        self.parameters = tuple(parameters)
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
    ) -> ParameterLedger:
        """Assigns each trainable parameter of `model`.

        Args:
            model: the bare model or a wrapped one; wrapper prefixes are left out of the names.
            weight_decay: decay of the tensors that decay.
            rule: the rule that decides. `dimension`: tensors of two or more dims decay. `name`: all
                decay but norms (by type), biases and what the model marks `_no_weight_decay`.
            decay_embeddings: False takes embeddings out of the decay under either rule.
            overrides: rates and decays by name; each parameter may match one at most.

        Raises:
            ModelError: the model has no trainable parameter, or one is an uninitialised lazy one.
            RequestError: an override matches nothing, or two match one parameter.
        """
        rows, parameters = [], []
        matched: set[str] = set()
        for entry in _entries(model):
            override = _matching(entry.name, overrides)
            if override is not None:
                matched.add(override.pattern)
            rows.append(_row(entry, rule, weight_decay, decay_embeddings, override))
            parameters.append(entry.parameter)
        if not rows:
            raise ModelError(
                "the model has no trainable parameter",
                where=type(model).__name__,
                rule="an optimizer needs at least one parameter with requires_grad",
                remedy="unfreeze a part of the model",
            )
        _refuse_idle(overrides, matched, [row.name for row in rows])
        return cls(rows, parameters, rule)

    @property
    def disagreements(self) -> tuple[LedgerRow, ...]:
        """Tensors that one rule would decay and the other would not."""
        return tuple(row for row in self.rows if not row.rules_agree)

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups for a torch optimizer, in order of first appearance.

        Each holds `params`, `weight_decay`, and for us `name`, `parameter_names`, `lr_multiplier`.
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


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    owners: tuple[nn.Module, ...]


def _entries(model: nn.Module) -> Iterator[_Entry]:
    names: dict[int, list[str]] = {}
    owners: dict[int, list[nn.Module]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            name = plain_name(f"{module_name}.{leaf}" if module_name else leaf)
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ModelError(
                    f"parameter {name} is not initialised yet",
                    where=name,
                    rule="an optimizer needs the shape of each parameter",
                    remedy="run one batch through the lazy module first",
                )
            key = id(parameter)
            parameters[key] = parameter
            names.setdefault(key, []).append(name)
            owners.setdefault(key, []).append(module)
    for key, parameter in parameters.items():
        first, *aliases = names[key]
        yield _Entry(first, tuple(aliases), parameter, tuple(owners[key]))


def _matching(name: str, overrides: Sequence[GroupOverride]) -> GroupOverride | None:
    found = [override for override in overrides if fnmatchcase(name, override.pattern)]
    if len(found) > 1:
        raise RequestError(
            f"parameter {name} matches {len(found)} group overrides: "
            + ", ".join(f"'{override.pattern}'" for override in found),
            where="optimizer.groups",
            rule="each trainable parameter is in exactly one group",
            remedy="narrow the patterns until one matches",
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
            rule="a group override changes at least one parameter",
            remedy=f"names look like {', '.join(names[:3])}; `surefoot show params` lists all",
        )


def _row(
    entry: _Entry,
    rule: DecayRule,
    weight_decay: float,
    decay_embeddings: bool,
    override: GroupOverride | None,
) -> LedgerRow:
    parameter = entry.parameter
    by_dimension = parameter.dim() >= 2
    by_name, name_reason = _decays_by_name(entry)
    decided_by: Decider = rule
    if rule == "dimension":
        decays = by_dimension
        reason = f"{parameter.dim()} dims, {'at least' if decays else 'fewer than'} 2"
    else:
        decays, reason = by_name, name_reason
    if not decay_embeddings and _is_embedding(entry):
        decays, decided_by, reason = False, "embeddings", "an embedding, and those do not decay"
    group = DECAY if decays else NO_DECAY
    decay, lr_multiplier = (weight_decay if decays else 0.0), 1.0
    if override is not None:
        lr_multiplier = override.lr_multiplier
        if override.weight_decay == INHERIT:
            group = f"{override.pattern} {group}"
        else:
            decay, decided_by = float(override.weight_decay), "override"
            group, reason = override.pattern, f"matches '{override.pattern}'"
    return LedgerRow(
        name=entry.name,
        aliases=entry.aliases,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        num_elements=parameter.numel(),
        group=group,
        weight_decay=decay,
        lr_multiplier=lr_multiplier,
        decided_by=decided_by,
        reason=reason,
        by_dimension=by_dimension,
        by_name=by_name,
        name_reason=name_reason,
    )


def _decays_by_name(entry: _Entry) -> tuple[bool, str]:
    if getattr(entry.parameter, "_no_weight_decay", False):
        return False, "marked `_no_weight_decay` by the model"
    for owner in entry.owners:
        if isinstance(owner, _NORM_TYPES):
            return False, f"belongs to {type(owner).__name__}"
    for name in (entry.name, *entry.aliases):
        for label, pattern in _UNDECAYED_NAMES:
            if pattern.search(name.lower()):
                return False, f"its name matches '{label}'"
    return True, "no name or type that is left out"


def _is_embedding(entry: _Entry) -> bool:
    if any(isinstance(owner, _EMBEDDING_TYPES) for owner in entry.owners):
        return True
    # A position or class embedding that is a bare parameter of its module.
    return "embed" in entry.name.rpartition(".")[2].lower()


def check_groups(model: nn.Module, groups: Iterable[dict[str, Any]]) -> None:
    """Checks the groups of any torch optimizer against `model`.

    Raises:
        ModelError: a trainable parameter is in no group or in two, or a frozen or foreign tensor is
            in one.
    """
    known = {id(p): name for name, p in named_trainable(model).items()}
    counts = dict.fromkeys(known, 0)
    problems = []
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) in counts:
                counts[id(parameter)] += 1
            else:
                problems.append(_foreign(parameter))
    for key, count in counts.items():
        if count != 1:
            problems.append(f"{known[key]} is in {'no group' if count == 0 else f'{count} groups'}")
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelError(
            f"the optimizer's groups do not fit the model: {len(problems)} problems",
            where=shown + more,
            rule="each trainable parameter is in exactly one group, and nothing else is",
            remedy="build the groups with ParameterLedger.build(model, ...).groups()",
        )


def _foreign(parameter: Tensor) -> str:
    kind = "frozen" if not parameter.requires_grad else "not of this model"
    return f"a tensor of shape {tuple(parameter.shape)} is {kind}"
