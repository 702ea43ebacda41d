"""What `surefoot audit` adds to a loop: the GPT of the demo, and residual networks.

All loops are plain PyTorch. Each is run bare, under `light` and under `deep` in turn, several
times over, and the best of each counts: what is slower is the neighbours' doing. Everything that
the audit does is inside the clock, attaching and the rules' last words too. Processor time stands
beside the wall time, which another process can stretch; the limits hold for both. The tiny network
on pictures of 8 x 8 shows the cost of an update by itself; no limit is asked of it.

    python benchmarks/audit_overhead.py [--updates 60] [--repetitions 5] [--only gpt|resnet|digits]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from surefoot.models.gpt import GPT, GPTConfig
from surefoot.models.resnet import ResNet, ResNetConfig
from surefoot.sanitizer.session import Audit

LIMITS = {"light": 0.10, "deep": 0.50}
VOCABULARY, LENGTH = 512, 128


class Cost(NamedTuple):
    """Seconds of one run of a loop."""

    wall: float
    processor: float


def loop(model: nn.Module, data: TensorDataset, batch: int, updates: int, loss: Callable) -> None:
    """The usual loop: zero, forward, backward, clip, step, schedule; the loss is read each time."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    schedule = CosineAnnealingLR(optimizer, T_max=updates)
    loader = DataLoader(data, batch, shuffle=True, drop_last=True)
    done, total = 0, 0.0
    model.train()
    while done < updates:
        for inputs, targets in loader:
            optimizer.zero_grad()
            value = loss(model(inputs), targets)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += value.item()
            done += 1
            if done == updates:
                return


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross entropy of each token given those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt(updates: int) -> None:
    """The model, micro-batch and sequence length of the demo."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocabulary_size=VOCABULARY, sequence_length=LENGTH, num_layers=4, num_heads=4,
        num_kv_heads=4, embedding_dim=128, feedforward_dim=384,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (256, LENGTH))
    loop(GPT(config), TensorDataset(ids, ids), 16, updates, next_token_loss)


def pictures(config: ResNetConfig, size: int, batch: int, updates: int) -> None:
    """A residual network on random pictures."""
    torch.manual_seed(0)
    shape = (16 * batch, config.in_channels, size, size)
    data = TensorDataset(torch.randn(shape), torch.randint(10, (16 * batch,)))
    loop(ResNet(config), data, batch, updates, functional.cross_entropy)


def resnet(updates: int) -> None:
    """The size of CIFAR's pictures."""
    pictures(ResNetConfig(in_channels=3, num_classes=10), 32, 32, updates)


def digits(updates: int) -> None:
    """The model and micro-batch of the recipe on handwritten digits."""
    config = ResNetConfig(in_channels=1, num_classes=10, widths=(16, 32), blocks_per_stage=1)
    pictures(config, 8, 64, updates)


LOOPS = {"gpt": (gpt, 1.0), "resnet": (resnet, 0.5), "digits": (digits, 10.0)}
"""The loops, and how many times more updates each makes."""
WITHOUT_LIMIT = ("digits",)


def measure(run: Callable[[int], None], updates: int, level: str) -> Cost:
    """One run of a loop at one level; `bare` is without the audit."""
    audit = contextlib.nullcontext() if level == "bare" else Audit(deep=level == "deep")
    begin = time.perf_counter(), time.process_time()
    with audit:
        run(updates)
    cost = Cost(time.perf_counter() - begin[0], time.process_time() - begin[1])
    if isinstance(audit, Audit) and (audit.findings or audit.trace.internal_errors):
        raise SystemExit(f"this loop is clean: {audit.findings} {audit.trace.internal_errors}")
    return cost


def main() -> int:
    """Measures, prints both side by side, and says whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=list(LOOPS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    held = True
    print(f"torch {torch.__version__}, best of {asked.repetitions}, one thread")
    print("ms an update                wall             processor")
    for name, (run, factor) in LOOPS.items():
        if asked.only not in (None, name):
            continue
        updates = int(asked.updates * factor)
        run(5)
        costs: dict[str, list[Cost]] = {"bare": [], "light": [], "deep": []}
        for _ in range(asked.repetitions):
            for level, seen in costs.items():
                seen.append(measure(run, updates, level))
        best = {level: Cost(*map(min, zip(*seen, strict=True))) for level, seen in costs.items()}
        for level, cost in best.items():
            line = f"  {name:<8}{level:<8}"
            for value, bare in zip(cost, best["bare"], strict=True):
                line += f"{1e3 * value / updates:9.3f} ({value / bare - 1:+7.1%})"
            over = (level in LIMITS and name not in WITHOUT_LIMIT) and any(
                value / bare - 1 > LIMITS[level]
                for value, bare in zip(cost, best["bare"], strict=True)
            )
            held = held and not over
            print(line + ("  OVER THE LIMIT" if over else ""), flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
