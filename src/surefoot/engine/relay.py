"""Takes micro-batches through the stages of a pipeline, by torch's own schedules.

Every rank of a pipeline has all micro-batches: each stage calls the task as one process would, with
a model that ends where the stage ends, so that any task runs, and only the last stage sees a loss.
What travels is the hidden state, padded to the largest micro-batch seen, so that uneven ones need
no other schedule. What is made of it is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.core.errors import DataError, ModelError
from surefoot.data.batch import MicroBatch
from surefoot.engine.refusal import naming_batch
from surefoot.parallel.pipeline import Pipeline, Stage
from surefoot.parallel.pipeline_schedule import run_schedule
from surefoot.tasks.calling import logits_of, named_entries
from surefoot.tasks.scoring import FINISH

Meeting = Callable[[Stage, MicroBatch], Tensor]
"""What a stage makes of a micro-batch, once its model has what came from the stage before."""


class Reached(BaseException):
    """Ends the call of a task on a stage whose model has no scores to give; no error."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class StageModel(nn.Module):
    """The model as a task on one stage calls it: the last gives scores, the others end the call."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.module = stage.model
        self._is_last = stage.is_last

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self._is_last:
            return self.module(*arguments, **named)
        if FINISH in named:
            named[FINISH] = _hidden_alone
        raise Reached(logits_of(self.module(*arguments, **named)))


def _hidden_alone(hidden: Tensor, _: nn.Module) -> Tensor:
    return hidden


class Relay:
    """Takes micro-batches through all stages, in the order of the pipeline's schedule.

    Args:
        pipeline: of this rank.
        trains: forwards and backwards, or forwards alone.
    """

    def __init__(self, pipeline: Pipeline, *, trains: bool) -> None:
        self._pipeline = pipeline
        self._trains = trains
        self._most = (0, 0)
        self._schedules: dict[int, Any] = {}

    def __call__(self, micro_batches: Sequence[MicroBatch], meet: Meeting) -> None:
        """Every rank of a pipeline calls it with the same micro-batches."""
        shapes = [self._pipeline.hidden_shape(tokens_of(m.data)) for m in micro_batches]
        self._make_room(shapes)
        number = len(micro_batches)
        if number not in self._schedules:
            self._schedules[number] = self._make_schedule(number)
        for stage in self._pipeline.stages:
            counter = _Backwards(self._pipeline.sync_of(stage), number)
            stage.begin(
                [
                    self._work(micro_batch, shape, meet, counter)
                    for micro_batch, shape in zip(micro_batches, shapes, strict=True)
                ]
            )
        run_schedule(self._schedules[number], number)

    def _make_room(self, shapes: Sequence[tuple[int, int]]) -> None:
        most = (max(b for b, _ in [self._most, *shapes]), max(s for _, s in [self._most, *shapes]))
        if most != self._most:
            self._most = most
            self._schedules.clear()

    def _make_schedule(self, num_micro_batches: int) -> Any:
        # It brings the compiler along, and takes a second: only where there are stages.
        from torch.distributed.pipelining import PipelineStage

        pipeline = self._pipeline
        hidden = torch.empty(
            (*self._most, pipeline.width),
            dtype=pipeline.dtype,
            device="meta",
            requires_grad=self._trains,
        )
        number = torch.empty(1, dtype=pipeline.dtype, device="meta", requires_grad=self._trains)
        stages = [
            PipelineStage(
                stage,
                stage_index=stage.index,
                num_stages=pipeline.order.num_stages,
                device=pipeline.device,
                input_args=() if stage.is_first else (hidden,),
                # The last gives one number: torch puts those of all micro-batches together.
                output_args=number if stage.is_last else hidden,
                group=pipeline.group,
            )
            for stage in pipeline.stages
        ]
        loss = _summed if self._trains else None
        return pipeline.order.schedule(stages, num_micro_batches, loss)

    def _work(
        self, micro_batch: MicroBatch, shape: tuple[int, int], meet: Meeting, counter: _Backwards
    ) -> Callable[[Stage, Tensor | None], Tensor]:
        def work(stage: Stage, received: Tensor | None) -> Tensor:
            batch, length = shape
            if received is not None:
                stage.receive(received[:batch, :length])
            with naming_batch(micro_batch):
                output = meet(stage, micro_batch)
            # No view: torch could not let go of its graph.
            output = torch.stack([output]) if stage.is_last else self._padded(output, shape)
            if output.requires_grad:
                output.register_hook(counter.begins)
            return output

        return work

    def _padded(self, hidden: Tensor, shape: tuple[int, int]) -> Tensor:
        pipeline = self._pipeline
        if hidden.shape != (*shape, pipeline.width) or hidden.dtype != pipeline.dtype:
            raise ModelError(
                f"a stage gives {list(hidden.shape)} of {hidden.dtype}",
                where="parallel.pipeline",
                rule=f"what goes from block to block is {[*shape, pipeline.width]} of "
                f"{pipeline.dtype}",
                remedy="use parallel.shard instead of parallel.pipeline",
            )
        (most_batch, most_length), (batch, length) = self._most, shape
        return F.pad(hidden, (0, 0, 0, most_length - length, 0, most_batch - batch)).contiguous()


class _Backwards:
    """Tells when the last backward of a stage's window begins: its gradients may be reduced."""

    def __init__(self, sync: Any, number: int) -> None:
        self._sync = sync
        self._left = number
        sync.micro_batch(number == 1)

    def begins(self, _: Tensor) -> None:
        self._left -= 1
        self._sync.micro_batch(self._left == 0)


def _summed(output: Tensor, _: Tensor) -> Tensor:
    # Another tensor than the output, which torch detaches in place.
    return output.sum()


def tokens_of(data: Any) -> Tensor:
    """The token ids of a batch, [batch, sequence].

    Raises:
        DataError: there are none.
    """
    named = named_entries(data)
    tokens = data if named is None else named.get("input_ids")
    if isinstance(tokens, tuple | list) and tokens:
        tokens = tokens[0]
    if isinstance(tokens, Tensor) and tokens.dim() == 2:
        return tokens
    raise DataError(
        "a batch holds no token ids",
        rule="stages send [batch, sequence, width], known from input_ids: [batch, sequence]",
        remedy="name them input_ids, or give them as the first entry of a tuple",
    )


def refuse_unreached(stage: Stage) -> None:
    """Refuses a task that never called the model.

    Raises:
        ModelError: on a stage whose call should have ended in the model.
    """
    if not stage.is_last:
        raise ModelError(
            "the loss was computed without the model",
            where="loss_sum",
            rule="the task calls the model that it is given, once a batch",
            remedy="call model(...) in the loss, or leave parallel.pipeline out",
        )
