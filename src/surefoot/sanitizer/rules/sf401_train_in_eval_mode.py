"""SF401: training goes on in eval mode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

LEAST = 3


class TrainInEvalMode(Rule):
    """A forward in eval mode is backpropagated and stepped, after training in train mode."""

    info = RuleInfo(
        code="SF401",
        slug="train-in-eval-mode",
        certainty=Certainty.STRONG,
        title="The model is trained in eval mode: dropout is off, BatchNorm does not learn.",
        observes="A forward of a root module in eval mode, with idle dropout or BatchNorm, whose"
        " output is backpropagated and stepped, after the module had trained in train mode."
        " Quiet for submodules frozen in eval while the root trains; a hint where the model never"
        " was in train mode.",
        why="From the first validation on, dropout no longer regularises and BatchNorm normalises"
        " with frozen statistics.",
        example="model.train()\nfor epoch in range(n):\n    train_epoch(model)\n"
        "    validate(model)  # calls model.eval()",
        fix="Call model.train() at the start of every training epoch.",
        source="Follows from nn.Module.train and eval.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.trained_in_train: set[int] = set()
        self.flips: dict[int, Site] = {}
        self.flip = NOWHERE
        self.pending: dict[int, tuple[Site, str]] = {}
        self.counts: dict[int, int] = defaultdict(int)
        self.before: dict[int, bool] = {}
        self.places: dict[int, tuple[Site, str, Site]] = {}

    def on_mode_changed(self, event: ev.ModeChanged) -> None:
        if not event.training:
            self.flip = event.site
            self.flips[self.trace.module_key(event.module)] = event.site

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if not event.grad_enabled:
            return
        if event.training:
            if event.active_dropout or event.active_batch_norm:
                self.trained_in_train.add(self.trace.module_key(event.module))
            return
        if not event.idle_sensitive or event.active_dropout or event.active_batch_norm:
            return
        key = self.trace.module_key(event.module)
        output = next((t for t in graph.tensors_in(event.output) if t.grad_fn is not None), None)
        if output is None or output.grad_fn is None:
            return
        place = event.site, type(event.module).__name__

        def used(grads: object) -> None:
            if "backward" in self.trace.causes:
                self.pending[key] = place

        output.grad_fn.register_prehook(used)

    def on_step_end(self, event: ev.StepEnd) -> None:
        for key, (site, name) in self.pending.items():
            if event.update.backwards:
                self.counts[key] += 1
                self.before.setdefault(key, key in self.trained_in_train)
                self.places[key] = site, name, self.flips.get(key, self.flip)
        self.pending = {}

    def findings(self) -> Iterable[Finding]:
        for key, count in self.counts.items():
            if count < LEAST:
                continue
            site, name, flip = self.places[key]
            flipped = f"eval() at line {flip.line} was the last word" if flip.line else "eval mode"
            was = "after it had trained in train mode" if self.before[key] else "from the start"
            yield self.report(
                f"{share(count, self.trace.updates)} updates were computed by {name} in eval mode,"
                f" {was} ({flipped}).",
                site,
                certainty=Certainty.STRONG if self.before[key] else Certainty.HEURISTIC,
                evidence={
                    "updates": self.trace.updates,
                    "in_eval_mode": count,
                    "eval_line": flip.line,
                },
            )
