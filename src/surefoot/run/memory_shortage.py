"""What lives in memory during an update; and, where it ran out, what holds it and what to try.

It measures tensors that are there and changes none. The order of the advice goes from what costs
least to what changes most; each saving is an estimate, and says from what.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.assembly.run_parts import Assembly
from surefoot.engine.refusal import is_out_of_memory
from surefoot.observe.files.atomic import atomic_write
from surefoot.observe.formatting import format_bytes
from surefoot.observe.probes import MemoryProbe
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.scoring import takes_finish

OUT_OF_MEMORY_NAME = "out-of-memory.json"
MOST_TENSORS = 12
MOMENTS = {"adam": 2, "adamw": 2, "sgd": 1}
"""Tensors of a parameter's size that an optimizer keeps, before its first step has made them."""


def memory_table(assembly: Assembly) -> dict[str, int]:
    """Bytes on this rank of the weights, their gradients, the optimizer's state and the average."""
    trainable = assembly.trainable
    trained = trainable.optimizing.optimizer.parameters
    gradients = sum(_bytes(parameter) for parameter in trained)
    state = sum(map(_bytes, _tensors_in(trainable.optimizing.optimizer.state_by_name())))
    if not state:
        state = gradients * MOMENTS.get(assembly.settings.optimizer.kind, 0)
    model = assembly.material.model
    found = {
        "weights": sum(map(_bytes, (*model.parameters(), *model.buffers()))),
        "gradients": gradients,
        "optimizer_state": state,
    }
    if average := sum(map(_bytes, _tensors_in(trainable.optimizing.average.state_dict()))):
        found["moving_average"] = average
    return found


def explain(assembly: Assembly, peak_bytes: int) -> dict[str, Any]:
    """The table, the largest tensors and the ordered advice, as plain values.

    Args:
        peak_bytes: the highest use so far. What the states do not explain is taken as activations
            on a device of its own; on a CPU it is the process itself, its libraries and its data
            too, and nobody knows the share of activations.
    """
    table = memory_table(assembly)
    rest = max(0, peak_bytes - sum(table.values()))
    on_cpu = assembly.trainable.device.type == "cpu"
    name = "rest_of_the_process" if on_cpu else "activations_batch_and_workspace"
    largest = sorted(_named_tensors(assembly), key=lambda entry: -int(entry["bytes"]))
    return {
        "format": 1,
        "table": {**table, name: rest},
        "peak_bytes": peak_bytes,
        "largest_tensors": largest[:MOST_TENSORS],
        "advice": list(advice(assembly, table, 0 if on_cpu else rest)),
    }


def record_shortage(error: BaseException, assembly: Assembly, artifacts: Path) -> str | None:
    """Writes down why memory ran out, where it did, and adds it to the error; returns the table.

    Each rank writes a file of its own.
    """
    if not is_out_of_memory(error):
        return None
    found = explain(assembly, MemoryProbe(assembly.trainable.device)())
    rank = assembly.place.ranks.rank
    name = f"out-of-memory.rank-{rank}.json" if rank else OUT_OF_MEMORY_NAME
    text = as_lines(found)
    error.add_note(text)
    atomic_write(artifacts / name, json.dumps(found, indent=1) + "\n")
    return text


def as_lines(found: Mapping[str, Any]) -> str:
    """The table and the advice for people."""
    lines = ["what held the memory:"]
    lines += [f"  {n.replace('_', ' '):<34}{format_bytes(b)}" for n, b in found["table"].items()]
    lines.append("what to try, in this order (estimates):")
    for number, entry in enumerate(found["advice"], start=1):
        saves = entry["saves_bytes"]
        lines.append(f"  {number}. {entry['do']}" + (f": {format_bytes(saves)}" if saves else ""))
    return "\n".join(lines)


def advice(
    assembly: Assembly, table: Mapping[str, int], activations: int
) -> Iterator[dict[str, Any]]:
    """What to try, the least change first; `saves_bytes` is 0 where it cannot be told."""
    settings = assembly.settings
    train, section = settings.train, settings.memory
    if train.micro_batch > 1:
        smaller = -(-train.micro_batch // 2)
        window = train.accumulation * 2
        yield _entry(
            f"train.micro_batch={smaller} with train.accumulation={window}: the same update",
            activations * (train.micro_batch - smaller) // train.micro_batch,
        )
    blocks = getattr(assembly.material.model, "blocks", None)
    if section.recompute == "none" and blocks is not None and len(blocks) > 1:
        # One block is alive at a time, and the inputs of the others.
        yield _entry(
            "memory.recompute=blocks: the same numbers, about a third more computation",
            activations * (len(blocks) - 1) // len(blocks) * 8 // 10,
        )
    yield from _loss_advice(assembly, activations)
    if assembly.trainable.precision.name in ("fp32", "tf32"):
        yield _entry("precision.dtype=bf16: activations of half the size", activations // 2)
    if assembly.material.task.unit == "tokens":
        yield _entry("a shorter data.sequence_length: activations shrink with it", activations // 2)
    states = table["gradients"] + table["optimizer_state"]
    yield _entry(
        "two devices with parallel.shard=2: weights, gradients and optimizer state in halves",
        (states + table["weights"]) // 2,
    )


def _loss_advice(assembly: Assembly, activations: int) -> Iterator[dict[str, Any]]:
    """Of next tokens: the scores in float32 and their gradient need not be there at once."""
    task, model, settings = assembly.material.task, assembly.material.model, assembly.settings
    sizes, section = assembly.place.sizes, settings.memory
    if not isinstance(task, GenerationTask) or not takes_finish(model) or section.loss != "whole":
        return
    length = getattr(model.config, "sequence_length", 0) // sizes.context
    places = settings.train.micro_batch * length
    scores = places * task.vocabulary_size * 8
    if sizes.tensor > 1 and not settings.parallel.cut_logits:
        yield _entry(
            "parallel.cut_logits=true: scores stay cut over the vocabulary",
            min(activations, scores * (sizes.tensor - 1) // sizes.tensor),
        )
    elif sizes.tensor == 1 and sizes.pipeline == 1 and places > section.loss_chunk:
        yield _entry(
            "memory.loss=chunked: one more product with the output matrix",
            min(activations, scores * (places - section.loss_chunk) // places),
        )


def _entry(do: str, saves_bytes: int) -> dict[str, Any]:
    return {"do": do, "saves_bytes": saves_bytes}


def _named_tensors(assembly: Assembly) -> Iterator[dict[str, Any]]:
    """Every tensor that is alive, by name where it has one; each storage once."""
    seen: set[int] = set()
    model = assembly.material.model
    state = assembly.trainable.optimizing.optimizer.state_by_name()
    named: list[tuple[str, Tensor]] = [(f"weights {n}", p) for n, p in model.named_parameters()]
    named += [(f"gradient {n}", p.grad) for n, p in model.named_parameters() if p.grad is not None]
    named += [(f"optimizer {n}", t) for n, t in _tensors_with_paths(state)]
    named += [("activation or batch", t) for t in gc.get_objects() if issubclass(type(t), Tensor)]
    for name, tensor in named:
        try:
            place = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            continue  # Without a storage of its own, such as a fake tensor.
        if place in seen or not place:
            continue
        seen.add(place)
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield {
            "name": name,
            "shape": f"{dtype} {list(tensor.shape)}",
            "bytes": tensor.untyped_storage().nbytes(),
        }


def _tensors_with_paths(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_with_paths(inner, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors_with_paths(inner, f"{path}/{index}")


def _tensors_in(value: Any) -> Iterable[Tensor]:
    return (tensor for _, tensor in _tensors_with_paths(value))


def _bytes(tensor: Tensor) -> int:
    local = getattr(tensor, "to_local", None)
    held = local() if callable(local) else tensor
    return held.numel() * held.element_size()
