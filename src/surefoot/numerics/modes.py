"""Train and eval mode, kept per submodule.

It never calls `train()` to put modes back: that would set every submodule alike and wake a
BatchNorm that was frozen on purpose. `eval()` and `torch.no_grad()` are independent, and an
evaluation needs both; this file does the first only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from surefoot.core.errors import ModelError

MOST_NAMED: Final = 5
"""Submodules that an error spells out before it counts the rest."""


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, each submodule has its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` inside; each submodule's own mode afterwards, exception or not."""
    with preserved_modes(model):
        model.eval()
        yield


@contextmanager
def untouched_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, no BatchNorm of `model` takes its batch into its running statistics.

    It normalises by them, as in an evaluation, so that a batch of one sample is no error. One that
    meets other ranks in its forward goes on meeting them. A module with statistics of another kind
    has an attribute `takes_statistics`, which is False inside.
    """
    tracking = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.track_running_stats
        and module.training
    ]
    meeting = [module for module in tracking if isinstance(module, nn.SyncBatchNorm)]
    alone = [module for module in tracking if not isinstance(module, nn.SyncBatchNorm)]
    counting = [m for m in model.modules() if getattr(m, "takes_statistics", False)]
    for sync in meeting:
        sync.track_running_stats = False
    for module in alone:
        module.training = False
    for counter in counting:
        counter.takes_statistics = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for sync in meeting:
            sync.track_running_stats = True
        for module in alone:
            module.training = True
        for counter in counting:
            counter.takes_statistics = True  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class ModeSensitive:
    """A submodule that computes something else in train mode than in eval mode."""

    name: str
    """Dotted name in the model; empty for the model itself."""
    kind: str
    training: bool
    in_train: str
    """What it does in train mode."""
    in_eval: str


Effect = tuple[str, str]


def _dropout(module: Any) -> Effect | None:
    p = module.p
    return (f"drops with probability {p:g}", "passes its input on") if p > 0 else None


def _batch_norm(module: Any) -> Effect | None:
    if not module.track_running_stats:
        return None
    return (
        "normalises by the batch's statistics and updates the running ones",
        "normalises by the running statistics",
    )


def _recurrent(module: Any) -> Effect | None:
    p = module.dropout
    if p > 0 and module.num_layers > 1:
        return (f"drops between layers with probability {p:g}", "drops nothing")
    return None


def _attention(module: Any) -> Effect | None:
    p = module.dropout
    return (f"drops attention weights with probability {p:g}", "drops nothing") if p > 0 else None


def _random_slope(module: Any) -> Effect | None:
    return ("draws its negative slope", "uses the mean negative slope")


_BY_TYPE: tuple[tuple[type[nn.Module], Callable[[Any], Effect | None]], ...] = (
    (nn.modules.dropout._DropoutNd, _dropout),
    (nn.modules.batchnorm._NormBase, _batch_norm),
    (nn.RNNBase, _recurrent),
    (nn.MultiheadAttention, _attention),
    (nn.RReLU, _random_slope),
)


def _effect(module: nn.Module) -> Effect | None:
    for kind, effect in _BY_TYPE:
        if isinstance(module, kind):
            return effect(module)
    if type(module).__module__.startswith("torch.nn."):
        return None
    code = getattr(type(module).forward, "__code__", None)
    if code is not None and "training" in code.co_names:
        return ("its forward reads `self.training`", "its forward reads `self.training`")
    return None


def mode_sensitive_modules(model: nn.Module) -> list[ModeSensitive]:
    """Every submodule whose output or state depends on its mode, in the order of the model.

    Known by type: dropout of every kind (p > 0), batch and instance norm with running statistics,
    recurrent layers and attention with dropout, RReLU. Any other class counts where its own
    `forward` reads `self.training`. LayerNorm, RMSNorm, GroupNorm and Linear compute the same in
    both modes.
    """
    found = []
    for name, module in model.named_modules():
        effect = _effect(module)
        if effect is not None:
            found.append(ModeSensitive(name, type(module).__name__, module.training, *effect))
    return found


def refuse_evaluation_mode(model: nn.Module) -> None:
    """Refuses to train a model of which every part that computes otherwise in training is off.

    So a model comes out of `from_pretrained` or `surefoot.load`. Parts in evaluation mode inside a
    model in training mode are meant, and stay so.

    Raises:
        ModelError: with the parts that would do nothing.
    """
    sensitive = mode_sensitive_modules(model)
    if not sensitive or model.training or any(entry.training for entry in sensitive):
        return
    shown = ", ".join(f"{entry.kind} {entry.name}".strip() for entry in sensitive[:3])
    more = f" and {len(sensitive) - 3} more" if len(sensitive) > 3 else ""
    raise ModelError(
        f"the model is in evaluation mode, also {shown}{more}",
        where=type(model).__name__,
        rule="a model is trained in the modes that it is handed in with",
        remedy="call model.train(), and .eval() on the parts that shall stay as they are",
    )


def training_modes(model: nn.Module) -> dict[str, bool]:
    """Name to mode of every mode-sensitive submodule, to compare with later."""
    return {entry.name: entry.training for entry in mode_sensitive_modules(model)}


class ModeWatch:
    """Remembers the modes in which a model is trained; `check` is cheap enough for every update.

    Args:
        model: the model as training begins, frozen parts in eval mode already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched = [
            (name, model.get_submodule(name), mode) for name, mode in training_modes(model).items()
        ]

    def check(self) -> None:
        """Compares.

        Raises:
            ModelError: naming the submodules and the mode that each is in.
        """
        for _, module, mode in self._watched:
            if module.training is not mode:
                _refuse(self._watched)


def check_training_modes(model: nn.Module, expected: Mapping[str, bool]) -> None:
    """Refuses to train a model whose submodules are in another mode than expected.

    Args:
        model: the model about to be trained.
        expected: name to mode, as `training_modes` gave it when training began.

    Raises:
        ModelError: naming the submodules and the mode that each is in.
    """
    _refuse([(name, model.get_submodule(name), mode) for name, mode in expected.items()])


def _refuse(watched: Sequence[tuple[str, nn.Module, bool]]) -> None:
    wrong = [
        f"{name or 'the model'} is in {'eval' if expected else 'train'} mode"
        for name, module, expected in watched
        if module.training is not expected
    ]
    if wrong:
        shown = "; ".join(wrong[:MOST_NAMED])
        if len(wrong) > MOST_NAMED:
            shown += f"; and {len(wrong) - MOST_NAMED} more"
        raise ModelError(
            f"{len(wrong)} submodules changed their mode during training",
            where=shown,
            rule="each submodule trains in the mode that it had at the start",
            remedy="evaluate inside evaluation_mode(model), which puts every mode back",
        )
