"""Whether a plain loss adds up over samples, as it must: asked once, on a few samples.

Without this a mean would train without a word, with a gradient that is too small by the size of the
batch; predictions [N, 1] against targets [N] would be broadcast to N x N pairs; and a loss that
couples the samples of a batch would be another one under another split. The check leaves no trace
in gradients, modes or random state, and says nothing where it cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from surefoot.core.errors import ModelError
from surefoot.core.interruption import RAISED_BY_USER_CODE
from surefoot.data.batch import map_tensors, move_to
from surefoot.numerics.determinism import preserved_rng
from surefoot.numerics.modes import evaluation_mode
from surefoot.tasks.task import FunctionTask, leading_sizes

NUM_SAMPLES = 4
TOLERANCE = 1e-3
"""Relative; a sum is off by 1, so nothing near this is needed."""
COUPLED = 0.02
"""Relative difference between the loss of a batch and the sum of its halves' losses above which
samples are coupled: far above rounding, in half precision too."""
ELEMENTWISE = frozenset(
    {"sub", "subtract", "rsub", "__sub__", "__rsub__", "eq", "__eq__", "ne", "__ne__"}
    | {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
)
"""Operations in which a prediction meets its target."""
EXPLICIT = frozenset(["__getitem__", "unsqueeze", "view", "reshape", "expand", "__get__", "t"])
"""Who makes a column by one of these means all pairs."""

Losses = dict[str, float]


@dataclass(frozen=True)
class FewSamples:
    """A few samples in several batches."""

    count: int
    once: Any
    twice: Any
    """The same samples, each given twice."""
    again: Any
    """`once`, collated once more: differs where collation draws random numbers."""
    rotated: Any
    """In another order."""
    halves: tuple[Any, Any]

    @classmethod
    def of(cls, samples: Sequence[Any], collate: Callable[[Sequence[Any]], Any]) -> FewSamples:
        """Of samples as the data set gives them, at least one."""
        few = list(samples[:NUM_SAMPLES])
        middle = max(1, len(few) // 2)
        return cls(
            len(few),
            collate(few),
            collate([*few, *few]),
            collate(few),
            collate([*few[1:], few[0]]),
            (collate(few[:middle]), collate(few[middle:] or few[:middle])),
        )

    @classmethod
    def cut_from(cls, batch: Any) -> FewSamples | None:
        """Of a collated batch; None where its shapes do not say which dimension holds samples."""
        sizes = leading_sizes(batch)
        if len(sizes) != 1 or not (size := sizes.pop()):
            return None

        def picked(*places: int) -> Any:
            return map_tensors(batch, lambda t: t[list(places)] if t.ndim else t)

        few = list(range(min(NUM_SAMPLES, size)))
        return cls.of(few, lambda places: picked(*places))


def check_sums(model: nn.Module, task: FunctionTask, few: FewSamples, device: torch.device) -> str:
    """Compares losses of a few samples, given once, twice, in another order and in halves.

    Args:
        few: on the CPU.

    Returns:
        A sentence about samples that are coupled; empty where none are, or nobody can tell.

    Raises:
        ModelError: the loss or one of its terms is a mean, or a metric or the loss compares each
            prediction with every target.
    """
    with evaluation_mode(model), eager(model), preserved_rng(device), torch.no_grad():

        def losses(batch: Any) -> Losses:
            return _numbers(task.loss_fn(model, move_to(batch, device)))

        try:
            once, twice = losses(few.once), losses(few.twice)
        except RAISED_BY_USER_CODE:
            # Whatever is wrong with the batch or the model, the first update says it in its place.
            return ""
        _refuse_a_mean(task, once, twice)
        for name, function in {"loss": task.loss_fn, **task.metrics}.items():
            _refuse_broadcast(name, function, model, few, device)
        if few.count < 2 or task.depends_on_split:
            return ""
        try:
            same, rotated = losses(few.again), losses(few.rotated)
            first, second = (losses(half) for half in few.halves)
        except RAISED_BY_USER_CODE:
            return ""
    return _coupling(once, same, rotated, {term: first[term] + second[term] for term in first})


def _refuse_a_mean(task: FunctionTask, once: Losses, twice: Losses) -> None:
    for term, loss in once.items():
        if loss and abs(twice[term] / loss - 1.0) < TOLERANCE:
            name = f"the loss term '{term}'" if term else "the loss"
            raise ModelError(
                f"{name} is a mean, not a sum: {loss:.6g} for a few samples, {twice[term]:.6g} for "
                "the same samples twice",
                where=_name_of(task.loss_fn),
                rule="a loss is summed over the samples of a batch; the update divides it once, by "
                "the weight of the whole window",
                remedy='sum it: loss.sum(), or reduction="sum" in torch\'s losses',
            )


def _coupling(once: Losses, same: Losses, rotated: Losses, halves: Losses) -> str:
    """What samples that are coupled show. Nothing is said of a loss that draws random numbers."""
    for term, loss in once.items():
        size = max(abs(loss), abs(halves.get(term, loss)))
        if not _differs(loss, same.get(term, loss), size, TOLERANCE):
            name = f"the loss term '{term}'" if term else "the loss"
            why = "so another micro-batch, accumulation or number of ranks is another loss"
            if _differs(loss, halves.get(term, loss), size, COUPLED):
                return (
                    f"{name} couples the samples of a batch: {loss:.6g} for a few samples, "
                    f"{halves[term]:.6g} for their halves added up; {why}"
                )
            if _differs(loss, rotated.get(term, loss), size, COUPLED):
                return (
                    f"{name} goes by the order of the samples in a batch: {loss:.6g} for a few "
                    f"samples, {rotated[term]:.6g} in another order; {why}"
                )
    return ""


def _differs(one: float, other: float, size: float, tolerance: float) -> bool:
    return abs(one - other) > tolerance * size


def _refuse_broadcast(
    name: str,
    function: Callable[[nn.Module, Any], Any],
    model: nn.Module,
    few: FewSamples,
    device: torch.device,
) -> None:
    """Refuses a column of predictions beside a row of targets, if seen with both batches."""
    seen = []
    for batch, count in ((few.once, few.count), (few.twice, 2 * few.count)):
        watch = _BroadcastWatch(count)
        try:
            with watch.outside_of(model), watch:
                function(model, move_to(batch, device))
        except RAISED_BY_USER_CODE:
            return
        seen.append(watch.seen)
    if both := [operation for operation in seen[0] if operation in seen[1]]:
        operation, column_first = both[0]
        shapes = ("[N, 1]", "[N]") if column_first else ("[N]", "[N, 1]")
        raise ModelError(
            f"{shapes[0]} and {shapes[1]} are broadcast to [N, N] in '{operation}' of "
            f"{'the loss' if name == 'loss' else f'metric {name!r}'}: each of N predictions is "
            "compared with every target",
            where=_name_of(function),
            rule="predictions and targets have one shape; nothing is broadcast",
            remedy="give both the same shape: prediction.squeeze(-1) or target.unsqueeze(-1); "
            "where all pairs are meant, write target[None, :]",
        )


class _BroadcastWatch(TorchFunctionMode):
    """Notes elementwise operations on [N] and [N, 1], outside of the model's own forward."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []
        self._shapes = ((count,), (count, 1))
        self._explicit: list[Tensor] = []
        self._inside = 0

    @contextmanager
    def outside_of(self, model: nn.Module) -> Iterator[None]:
        """Inside, what the model computes is not looked at."""

        def enter(*_: Any) -> None:
            self._inside += 1

        def leave(*_: Any) -> None:
            self._inside -= 1

        hooks = [
            model.register_forward_pre_hook(enter),
            model.register_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside:
            return result
        name = getattr(func, "__name__", "")
        if name in EXPLICIT and isinstance(result, Tensor):
            self._explicit.append(result)
        elif name in ELEMENTWISE:
            found = [value for value in args[:2] if isinstance(value, Tensor)]
            shapes = {tuple(value.shape): value for value in found}
            if shapes.keys() == set(self._shapes):
                column = shapes[self._shapes[1]]
                if not any(column is made for made in self._explicit):
                    self.seen.append((name.strip("_"), found[0] is column))
        return result


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Inside, blocks that are to be compiled run as they are written: not for so few samples."""
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    implementations = [module._compiled_call_impl for module in compiled]
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, implementation in zip(compiled, implementations, strict=True):
            module._compiled_call_impl = implementation


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _numbers(loss: Tensor | Mapping[str, Tensor]) -> Losses:
    terms = loss if isinstance(loss, Mapping) else {"": loss}
    return {term: float(value) for term, value in terms.items()}
