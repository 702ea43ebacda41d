"""THE update: everything numeric that happens between one set of weights and the next, in order.

Read it straight down. It knows no mesh, no optional feature and no device: those enter as a pass,
an optimizer or an injected reduction. It never waits for the device except for the numbers of the
update before, and it never publishes anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from surefoot.engine.after_update import AfterUpdate
from surefoot.engine.in_flight import NOTHING, PendingReport, Signals
from surefoot.engine.passes import Pass
from surefoot.engine.reporting import ReportLog
from surefoot.engine.window import Window
from surefoot.numerics.clipping import Flag
from surefoot.numerics.loss_scaling import LossScale
from surefoot.optim.update import UpdateOptimizer


@dataclass(frozen=True)
class UpdateParts:
    """What one update is made of. Every part is chosen once, before the first update."""

    parameters: Sequence[Tensor]
    """Trainable parameters, in the order of the model."""
    sum_over_ranks: Callable[[Mapping[str, float]], Mapping[str, float]]
    """Sums host numbers over the data-parallel ranks; the identity on one."""
    run_pass: Pass
    loss_scale: LossScale
    gradients_of: Callable[[Sequence[Tensor]], list[Tensor]]
    """The gradients that are there, as they lie on this rank."""
    global_norm: Callable[[Sequence[Tensor]], Tensor]
    """Norm over all gradients and shards, a 0-dim device tensor."""
    clip: Callable[[Sequence[Tensor], Tensor], None]
    course: Callable[[int], tuple[float, float | None]]
    """Updates completed -> (multiplier of the peak rate, momentum or None to leave it)."""
    optimizer: UpdateOptimizer
    average: AfterUpdate
    """A running average of the weights, and whatever else follows them."""
    signals: Signals
    log: ReportLog


class Update:
    """One optimizer step over one window. Call it with a window; numbers arrive in the log."""

    def __init__(self, parts: UpdateParts) -> None:
        self.parts = parts

    def __call__(self, window: Window) -> None:
        """Queues the update of `window` and settles the report of the update before it.

        Raises:
            NonFiniteError: the guard's policy is to stop, and the update before was not finite.
            RolledBack: the update before was a spike, and the run is to go back.
        """
        parts = self.parts

        # 1. No gradient is left from the window before.
        parts.optimizer.zero_grad()

        # 2. The denominators, over all data-parallel ranks, before the first forward.
        denominators = parts.sum_over_ranks(window.weights)
        if not any(denominators.values()):
            parts.log.hand_over(PendingReport(window, denominators, {}, NOTHING))
            return

        # 3. Forward and backward of every micro-batch: gradients of sum / denominator add up.
        losses = parts.run_pass(window.micro_batches, denominators, parts.loss_scale)
        gradients = parts.gradients_of(parts.parameters)

        # 4. Gradients leave the loss scale before anybody measures them.
        parts.loss_scale.unscale_(gradients)

        # 5. The global norm and the flag, on the device: finite, and below what the guard lets
        #    through (false for NaN too). The numbers set out for the host.
        grad_norm = parts.global_norm(gradients)
        limit = parts.log.norm_limit()
        finite = Flag(grad_norm, limit)
        numbers = {**losses, "grad_norm": grad_norm, "loss_scale": parts.loss_scale.value}
        sent = parts.signals.send(numbers, limit)

        # 6. Clip, once per window.
        parts.clip(gradients, grad_norm)

        # 7. The update before is now known: its count sets this update's rate. The optimizer does
        #    nothing where the flag is non-finite.
        step = parts.log.settle()
        parts.optimizer.set_rate(*parts.course(step))
        parts.optimizer.step(finite, known=sent.is_below_limit())

        # 8. Loss scale and average follow, the average only where the weights moved.
        parts.loss_scale.update(finite)
        parts.average.update(finite)

        # 9. The report is handed to the log, which reads it when it has arrived.
        sent = parts.signals.after_step(sent, step)
        parts.log.hand_over(PendingReport(window, denominators, parts.optimizer.rates(), sent))
