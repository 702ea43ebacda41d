"""A checkpoint of any number of ranks is read by any other number: the same tensors, whole."""

from __future__ import annotations

import os
import socket
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # Before the forks, which would each take seconds for it.
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from surefoot.parallel.ranks import world_ranks
from surefoot.state.checkpoint import newest_whole, write_checkpoint
from surefoot.state.reading import StoredTensors
from surefoot.state.shards import laid_out_like
from surefoot.state.tree import RANKS_KEY, join_tree, split_tree

SIZES = (1, 2, 4, 3)


def model(ranks: int) -> nn.Module:
    """Rows that divide by no number of ranks here, and one tensor smaller than the ranks."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 2))
    if ranks > 1:
        fully_shard(made, mesh=init_device_mesh("cpu", (ranks,)))
    return made


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(rank: int, ranks: int, folder: Path) -> None:
    made = model(ranks)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, foreach=True)
    made(torch.ones(3, 7)).square().sum().backward()
    optimizer.step()
    moments = {n: dict(optimizer.state[p]) for n, p in made.named_parameters()}
    state = {
        "model": made.state_dict(),
        "optimizer": {"parameters": moments},
        RANKS_KEY: {str(rank): {"rng": torch.full((3,), float(rank))}},
    }
    write_checkpoint(folder, 1, split_tree(state), {}, ranks=world_ranks())


def load(rank: int, ranks: int, folder: Path) -> None:
    _, manifest, snapshot, _ = newest_whole(folder, world_ranks())
    stored = snapshot.tensors
    assert isinstance(stored, StoredTensors)
    state = join_tree(snapshot)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 2))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1, foreach=True)
    whole(torch.ones(3, 7)).square().sum().backward()
    optimizer.step()
    live = model(ranks).state_dict()
    for name, weight in whole.named_parameters():
        # Gradients of several ranks are means of equal ones here: the same numbers.
        torch.testing.assert_close(state["model"][name], weight.detach(), rtol=1e-6, atol=1e-7)
        read = partial(stored.part, f"model/{name}")
        if isinstance(live[name], DTensor):
            mine = laid_out_like(live[name], read)
            assert mine.placements == live[name].placements
            assert torch.equal(full(mine), state["model"][name])
        assert state["optimizer"]["parameters"][name]["exp_avg"].shape == weight.shape
    saved_by = manifest.about["ranks"]
    assert sorted(state[RANKS_KEY]) == sorted(map(str, range(saved_by)))
    for owner, own in state[RANKS_KEY].items():
        assert torch.equal(own["rng"], torch.full((3,), float(owner)))


def process(rank: int, ranks: int, port: int, folder: str, work: str, errors: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        {"save": save, "load": load}[work](rank, ranks, Path(folder))
    except BaseException:
        Path(errors).write_text(traceback.format_exc())
        raise
    # Rank 0 holds the store: it stays until all have read from it.
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, work: str, folder: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    errors = tmp_path / "errors.txt"
    context = mp.start_processes(
        process,
        args=(ranks, port, str(folder), work, str(errors)),
        nprocs=ranks,
        join=False,
        start_method="fork",
    )
    try:
        while not context.join(timeout=60):
            pass
    except Exception:
        pytest.fail(errors.read_text() if errors.is_file() else "a rank died")


@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_other_has_written(
    saved_by: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    on_ranks(saved_by, "save", folder, tmp_path)
    for read_by in SIZES:
        on_ranks(read_by, "load", folder, tmp_path)
