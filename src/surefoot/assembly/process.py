"""This process, made ready to build a run: seeded, on its device, joined with the other ranks.

It builds nothing of the run itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from surefoot.config.sections import Settings
from surefoot.core.errors import RequestError
from surefoot.data.order import keyed_hash
from surefoot.numerics.determinism import seed_everything, use_deterministic
from surefoot.parallel.join import join_ranks
from surefoot.parallel.layout import ALONE, Place, find_place

RANK_SEED = 3
"""Sets the seeds of ranks apart from other uses of the run's seed."""


@dataclass(frozen=True)
class Process:
    """A process that is ready to build a run."""

    device: torch.device
    place: Place = ALONE
    """Where it stands among the ranks of the run."""


def prepare_process(settings: Settings) -> Process:
    """Seeds every generator, then does what `join_process` does.

    Call it before the model is built, so that its weights are those of the seed.

    Raises:
        RequestError: the device is not there, or the mesh does not fit the ranks.
        RankError: the other ranks are not there.
    """
    seed_everything(settings.seed)
    return join_process(settings)


def join_process(settings: Settings) -> Process:
    """Joins the ranks of a launch, sets the determinism switch and picks the device.

    It draws and seeds nothing.

    Raises:
        RequestError: the device is not there, or the mesh does not fit the ranks.
        RankError: the other ranks are not there.
    """
    join_ranks()
    use_deterministic(settings.deterministic)
    device = choose_device(settings.device)
    return Process(device, find_place(settings.parallel, device))


def choose_device(name: Literal["auto", "cpu", "cuda", "mps"]) -> torch.device:
    """The device of that name; `auto` takes CUDA, then MPS, then the CPU.

    Raises:
        RequestError: the device is not there.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    chosen = next(kind for kind, there in available.items() if there) if name == "auto" else name
    if not available[chosen]:
        raise RequestError(
            f"there is no {chosen} device",
            where="device",
            rule=f"available: {', '.join(kind for kind, there in available.items() if there)}",
            remedy="use device=auto",
        )
    if chosen == "cuda":
        return torch.device(chosen, torch.cuda.current_device())
    return torch.device(chosen)


def seed_rank(seed: int, place: Place) -> None:
    """Gives ranks that see other items, or hold other layers, dropout of their own.

    Ranks of the same items and layers share it, and rank 0 keeps the run's own.
    """
    if place.random_rank > 0:
        seed_everything(keyed_hash(seed, RANK_SEED, place.random_rank) >> 32)
