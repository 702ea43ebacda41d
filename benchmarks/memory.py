"""What each way to make a model fit saves, and what it costs in time. Prints; asserts nothing.

Run: `python benchmarks/memory.py [--device cuda]`. Peak bytes are those of one forward and backward
of a small GPT with a vocabulary of 32,768, counted by torch's own tracker (weights and gradients
apart); what waits on the host is counted as it goes there. Times are the best of several.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from surefoot.memory import offload
from surefoot.memory.offload import ActivationsOnHost, offload_blocks
from surefoot.memory.recompute import recompute_blocks
from surefoot.memory.recompute_budget import budget_blocks
from surefoot.memory.weights_on_host import WeightsOnHost
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.observe.formatting import format_bytes
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.scoring import ChunkedScores

VOCABULARY, LENGTH, BATCH = 32_768, 256, 4
BUDGET_BYTES = 64 << 20
ROUNDS = 3
TASK = GenerationTask(VOCABULARY)
CHUNKS = TASK.scored_by(ChunkedScores(128))


def made(device: torch.device) -> GPT:
    """The same model each time."""
    torch.manual_seed(0)
    config = GPTConfig.llama(
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        num_layers=6,
        num_heads=4,
        num_kv_heads=4,
        embedding_dim=256,
    )
    return GPT(config).to(device)


class Counted(ActivationsOnHost):
    """Counts the bytes that wait on the host; on the CPU they wait where the tracker looks not."""

    gone = 0

    def __init__(self, pin_memory: bool) -> None:
        super().__init__(pin_memory)
        pack, unpack = self.pack_hook, self.unpack_hook

        def counting(tensor: Tensor) -> Any:
            packed = pack(tensor)
            if isinstance(packed, Tensor):
                return packed
            Counted.gone += tensor.numel() * tensor.element_size()
            return packed if tensor.is_cuda else tensor.detach().numpy().copy()

        def back(packed: Any) -> Tensor:
            away = isinstance(packed, numpy.ndarray)
            return torch.from_numpy(packed).clone() if away else unpack(packed)

        self.pack_hook, self.unpack_hook = counting, back


def peak_bytes(model: GPT, run: Callable[[], None], device: torch.device) -> int:
    """Activations and what else is made on the way, at the worst moment."""
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        run()
    at_peak = tracker.get_tracker_snapshot("peak")
    (found,) = (sizes for place, sizes in at_peak.items() if place.type == device.type)
    states = ("Parameter", "Gradient", "Buffer")
    return sum(size for kind, size in found.items() if not str(kind).endswith((*states, "Total")))


def measured(
    change: Callable[[GPT], object], task: GenerationTask, device: torch.device
) -> tuple[int, int, float]:
    """Peak bytes on the device, bytes on the host, milliseconds of a forward and backward."""
    model = made(device)
    change(model)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)

    def run() -> None:
        model.zero_grad()
        task.loss_sum(model, {"input_ids": ids}).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    run()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    Counted.gone = 0
    return peak_bytes(model, run, device), Counted.gone, min(seconds) * 1e3


def with_weights(offloaded: bool, device: torch.device) -> tuple[int, float]:
    """Peak bytes of a window with its weights and gradients on CUDA, and its milliseconds."""
    torch.manual_seed(0)
    sizes = {"num_layers": 24, "num_heads": 16, "num_kv_heads": 16, "embedding_dim": 1024}
    model = GPT(GPTConfig.llama(vocabulary_size=1024, sequence_length=LENGTH, **sizes)).to(device)
    away = WeightsOnHost(model, device).away if offloaded else nullcontext
    ids = torch.randint(1024, (BATCH, LENGTH), device=device)
    task = GenerationTask(1024)
    seconds = []
    for _ in range(1 + ROUNDS):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with away():
            task.loss_sum(model, {"input_ids": ids}).backward()
            peak = torch.cuda.max_memory_allocated()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return peak, min(seconds[1:]) * 1e3


def main() -> None:
    """Measures each way in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    offload.ActivationsOnHost = Counted  # type: ignore[misc]
    ways: dict[str, tuple[Callable[[GPT], object], GenerationTask]] = {
        "as it is": (lambda model: None, TASK),
        "memory.loss=chunked": (lambda model: None, CHUNKS),
        "memory.recompute=selective": (lambda model: recompute_blocks(model, "selective"), TASK),
        "memory.recompute=blocks": (lambda model: recompute_blocks(model, "blocks"), TASK),
        "memory.recompute=budget": (lambda model: budget_blocks(model, BUDGET_BYTES), TASK),
        "memory.offload_activations=cpu": (lambda model: offload_blocks(model, device), TASK),
        "recompute=blocks, loss=chunked": (lambda model: recompute_blocks(model, "blocks"), CHUNKS),
    }
    print(
        f"{BATCH} x {LENGTH} tokens, {VOCABULARY} words, 6 layers of 256, float32, {device};"
        f" a budget of {format_bytes(BUDGET_BYTES)}"
    )
    plain = 0
    for name, (change, task) in ways.items():
        peak, host, milliseconds = measured(change, task, device)
        plain = plain or peak
        saved = format_bytes(plain - peak) if plain > peak else "nothing"
        print(
            f"{name:<32} {format_bytes(peak):>10} at the peak, saves {saved:>10}, "
            f"{format_bytes(host):>9} on the host, {milliseconds:7.0f} ms"
        )
    if device.type == "cuda":
        for offloaded in (False, True):
            peak, milliseconds = with_weights(offloaded, device)
            name = "memory.offload_parameters=cpu" if offloaded else "24 layers of 1024 as they are"
            print(f"{name:<32} {format_bytes(peak):>10} with weights, {milliseconds:7.0f} ms")


if __name__ == "__main__":
    main()
