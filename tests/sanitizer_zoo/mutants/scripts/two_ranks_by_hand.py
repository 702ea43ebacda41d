"""Two ranks over gloo without a wrapper: weights sent from rank 0, gradients averaged by hand."""

import datetime
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BATCH = 6


def gradients_averaged(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(rank, num_ranks):
    torch.manual_seed(40 + rank)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    source = torch.Generator().manual_seed(9)
    inputs = torch.randn(96, 5, generator=source)
    targets = inputs.sin().sum(1)
    losses = []
    for _epoch in range(3):
        order = torch.randperm(96, generator=source)
        for rows in order[rank::num_ranks].split(BATCH):
            loss = F.l1_loss(model(inputs[rows]).squeeze(1), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            gradients_averaged(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return {"weights": model.state_dict(), "losses": losses}


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
        return train(rank, num_ranks)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    outcome = main()
