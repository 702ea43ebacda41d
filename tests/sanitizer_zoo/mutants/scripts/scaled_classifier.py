"""Half precision with a scaler and no clipping: a step function, a bag of words, a halving rate."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS, CLASSES = 50, 4


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, 16, mode="sum")
        self.hidden = nn.Linear(16, 24)
        self.classes = nn.Linear(24, CLASSES)

    def forward(self, words):
        return self.classes(F.relu(self.hidden(self.embedding(words))))


def training_step(model, optimizer, scaler, words, wanted):
    with torch.autocast("cpu", dtype=torch.float16):
        scores = model(words)
        loss = F.cross_entropy(scores, wanted)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach()


def main():
    torch.manual_seed(90)
    words = torch.randint(0, WORDS, (128, 7))
    wanted = words[:, :3].sum(1) % CLASSES
    model = BagOfWords()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    means = []
    for _epoch in range(4):
        losses = []
        for rows in torch.randperm(len(words)).split(16):
            losses.append(training_step(model, optimizer, scaler, words[rows], wanted[rows]))
        scheduler.step()
        means.append(torch.stack(losses).mean().item())
    return {"weights": model.state_dict(), "means": means}


if __name__ == "__main__":
    outcome = main()
