"""Two ranks over gloo: DistributedDataParallel, accumulation under no_sync, a sampler."""

import contextlib
import datetime
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATION = 2


def dataset():
    source = torch.Generator().manual_seed(3)
    x = torch.randn(64, 6, generator=source)
    return TensorDataset(x, (x[:, :3] + 0.1 * x[:, 3:]).argmax(1))


def train(rank, num_ranks):
    torch.manual_seed(100)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    torch.manual_seed(rank)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    parallel = DistributedDataParallel(model)
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=num_ranks, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for index, (x, y) in enumerate(loader):
            is_last = (index + 1) % ACCUMULATION == 0
            with contextlib.nullcontext() if is_last else parallel.no_sync():
                loss = F.cross_entropy(parallel(x), y) / ACCUMULATION
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def main():
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = "file://" + os.environ["RANKS_MEET_AT"]
    dist.init_process_group(
        "gloo",
        init_method=meeting,
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=10),
    )
    try:
        return {"weights": train(rank, num_ranks)}
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    outcome = main()
