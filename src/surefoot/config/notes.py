"""Advice on a valid recipe: what common practice does differently, with its source.

Advice is never an error and changes nothing; a recipe may have its reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from surefoot.config.load import Resolved
from surefoot.config.sections import (
    AdamSection,
    AdamWSection,
    ConstantSection,
    GPTSection,
    MLPSection,
    OneCycleSection,
    OwnScheduleSection,
    Recipe,
    ResNetSection,
    SGDSection,
    TextSection,
)
from surefoot.core.finding import Certainty, Finding, Severity

TENSOR_CORE_MULTIPLE = 8
"""Number of 16-bit elements along a dim that a GPU matrix product processes at once."""
LARGEST_BETA2 = 0.999
DECAY_RANGE = (0.01, 0.1)
RATE_RANGE = (1e-5, 1e-2)

_ADAMS = (AdamSection, AdamWSection)
_CONVENTION = (Severity.HINT, Certainty.CONVENTION)


def notes(resolved: Resolved[Recipe]) -> list[Finding]:
    """Advice on this recipe, in a fixed order."""
    found: list[Finding] = []
    for advise in _ADVICE:
        for path, finding in advise(resolved.recipe):
            file, line = _place(resolved.origins, path)
            evidence = {"key": path, **finding.evidence}
            found.append(
                Finding(
                    code=finding.code,
                    slug=finding.slug,
                    severity=finding.severity,
                    certainty=finding.certainty,
                    message=f"{path}: {finding.message}",
                    file=file,
                    line=line,
                    evidence=evidence,
                    fix=finding.fix,
                )
            )
    return [*_dropped(resolved), *found]


def _place(origins: Mapping[str, str], path: str) -> tuple[str, int]:
    file, _, line = origins.get(path, "").rpartition(":")
    return (file, int(line)) if line.isdecimal() else ("", 0)


def _dropped(resolved: Resolved[Recipe]) -> Iterator[Finding]:
    sections: dict[str, list[str]] = {}
    for path in resolved.dropped:
        sections.setdefault(path.split(".")[0], []).append(path)
    for section, paths in sections.items():
        yield Finding(
            "CFG001",
            "section-started-afresh",
            Severity.HINT,
            Certainty.PROOF,
            f"--set {section}.kind changes the kind of {section}, so values in the file for the "
            f"other kind are not used: {', '.join(paths)}",
            evidence={"dropped": dict(resolved.dropped)},
            fix=f"give the values of the new kind with --set {section}.KEY=VALUE",
        )


Advice = Iterator[tuple[str, Finding]]


def _constant_rate(recipe: Recipe) -> Advice:
    if isinstance(recipe.model, GPTSection) and isinstance(recipe.schedule, ConstantSection):
        yield (
            "schedule.kind",
            Finding(
                "CFG002",
                "constant-rate-for-language-model",
                *_CONVENTION,
                "language models reach a lower loss with a decay; a constant rate is the stable "
                "phase of a run with a later cooldown",
                evidence={"source": "arXiv:2405.18392"},
                fix="use warmup_cosine, or wsd, whose cooldown may be decided later",
            ),
        )


def _sgd_for_transformer(recipe: Recipe) -> Advice:
    if isinstance(recipe.model, GPTSection) and isinstance(recipe.optimizer, SGDSection):
        yield (
            "optimizer.kind",
            Finding(
                "CFG003",
                "sgd-for-transformer",
                *_CONVENTION,
                "transformers train far slower with SGD than with Adam",
                evidence={"source": "arXiv:1912.03194"},
                fix="use optimizer.kind=adamw",
            ),
        )


def _slow_second_moment(recipe: Recipe) -> Advice:
    optimizer = recipe.optimizer
    if not isinstance(recipe.model, GPTSection) or not isinstance(optimizer, _ADAMS):
        return
    if optimizer.betas[1] > LARGEST_BETA2:
        yield (
            "optimizer.betas",
            Finding(
                "CFG004",
                "slow-second-moment-for-language-model",
                *_CONVENTION,
                f"beta2 = {optimizer.betas[1]} averages squared gradients over "
                f"{1 / (1 - optimizer.betas[1]):,.0f} updates; language models use 0.95",
                evidence={"beta2": optimizer.betas[1], "source": "arXiv:2307.09288"},
                fix="use optimizer.betas=[0.9, 0.95]",
            ),
        )


def _weight_decay(recipe: Recipe) -> Advice:
    optimizer = recipe.optimizer
    low, high = DECAY_RANGE
    decay = optimizer.weight_decay
    if isinstance(optimizer, AdamWSection) and not low <= decay <= high:
        yield (
            "optimizer.weight_decay",
            Finding(
                "CFG005",
                "unusual-weight-decay",
                *_CONVENTION,
                f"AdamW is mostly used with a weight decay from {low:g} to {high:g}, not {decay:g}",
                evidence={"weight_decay": decay, "range": list(DECAY_RANGE)},
                fix="use 0.1 for language models; torch's default is 0.01",
            ),
        )
    if isinstance(optimizer, AdamSection) and decay:
        yield (
            "optimizer.weight_decay",
            Finding(
                "CFG006",
                "decay-through-adam",
                *_CONVENTION,
                "Adam adds the decay to the gradient and divides it by the second moment, so "
                "weights with large gradients decay less",
                evidence={"weight_decay": decay, "source": "arXiv:1711.05101"},
                fix="use optimizer.kind=adamw",
            ),
        )


def _no_warmup(recipe: Recipe) -> Advice:
    warmup = getattr(recipe.schedule, "warmup", 0)
    if isinstance(recipe.model, GPTSection) and isinstance(recipe.optimizer, _ADAMS):
        if warmup or isinstance(recipe.schedule, OneCycleSection | OwnScheduleSection):
            return
        yield (
            "schedule.warmup",
            Finding(
                "CFG007",
                "no-warmup-for-transformer",
                *_CONVENTION,
                "the first updates use a second moment of very few gradients; without a warm-up "
                "the loss may spike",
                evidence={"source": "arXiv:1908.03265"},
                fix="use for example schedule.warmup=0.02",
            ),
        )


def _peak_rate(recipe: Recipe) -> Advice:
    optimizer = recipe.optimizer
    low, high = RATE_RANGE
    if not isinstance(recipe.model, GPTSection) or not isinstance(optimizer, _ADAMS):
        return
    if not low <= optimizer.lr <= high:
        yield (
            "optimizer.lr",
            Finding(
                "CFG008",
                "unusual-peak-rate",
                Severity.HINT,
                Certainty.HEURISTIC,
                f"peak rates of published decoders are within {low:g} and {high:g}, mostly near "
                f"3e-4; this is {optimizer.lr:g}",
                evidence={"lr": optimizer.lr, "source": "arXiv:2307.09288"},
                fix="start from optimizer.lr=3e-4; a small decoder tolerates 1e-3",
            ),
        )


def _dims(recipe: Recipe) -> Iterator[tuple[str, int]]:
    model, data = recipe.model, recipe.data
    if isinstance(model, GPTSection):
        yield "model.embedding_dim", model.embedding_dim
        yield "model.feedforward_dim", model.feedforward_dim
        if isinstance(model.vocabulary_size, int):
            yield "model.vocabulary_size", model.vocabulary_size
        if isinstance(data, TextSection):
            yield "data.vocabulary_size", data.vocabulary_size
    elif isinstance(model, ResNetSection):
        yield from (("model.widths", width) for width in model.widths)
    elif isinstance(model, MLPSection):
        yield from (("model.hidden", width) for width in model.hidden)


def _odd_dims(recipe: Recipe) -> Advice:
    multiple = TENSOR_CORE_MULTIPLE
    for path, dim in _dims(recipe):
        if dim % multiple:
            yield (
                path,
                Finding(
                    "CFG009",
                    "dim-not-multiple-of-8",
                    *_CONVENTION,
                    f"{dim} is not a multiple of {multiple}, which slows matrix products on GPUs",
                    evidence={"dim": dim},
                    fix=f"use {-(-dim // multiple) * multiple}",
                ),
            )


_ADVICE: tuple[Callable[[Recipe], Advice], ...] = (
    _constant_rate,
    _sgd_for_transformer,
    _slow_second_moment,
    _weight_decay,
    _no_warmup,
    _peak_rate,
    _odd_dims,
)
