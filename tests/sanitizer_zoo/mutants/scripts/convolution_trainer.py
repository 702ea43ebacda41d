"""A trainer class: convolutions, BatchNorm, AdamW in two groups, one-cycle schedule per update."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SmallConvNet(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList([nn.Conv2d(6, 6, 3, padding=1) for _ in range(2)])
        self.final_norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, num_classes)

    def forward(self, images):
        x = F.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = x + F.relu(block(x))
        x = self.final_norm(x.mean(dim=(2, 3)))
        x = F.dropout(x, 0.1, training=self.training)
        return self.head(x)


class Trainer:
    def __init__(self, model, training, validation, num_epochs):
        self.model = model
        self.num_epochs = num_epochs
        self.training = DataLoader(training, batch_size=16, shuffle=True, drop_last=True)
        self.validation = DataLoader(validation, batch_size=20)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.05},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=2e-3,
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=2e-3, total_steps=num_epochs * len(self.training)
        )
        self.log = []

    def fit(self):
        for _ in range(self.num_epochs):
            self.model.train()
            running = 0.0
            for images, labels in self.training:
                running += self.train_step(images, labels)
            self.log.append((running, self.accuracy()))

    def train_step(self, images, labels):
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.05)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self):
        self.model.eval()
        hits = 0
        for images, labels in self.validation:
            hits += (self.model(images).argmax(1) == labels).sum().item()
        return hits / len(self.validation.dataset)


def make_images(count, generator):
    labels = torch.randint(0, 3, (count,), generator=generator)
    images = torch.randn(count, 1, 8, 8, generator=generator)
    for index, label in enumerate(labels.tolist()):
        images[index, 0, 2 * label : 2 * label + 2] += 1.5
    return TensorDataset(images, labels)


def main():
    torch.manual_seed(1)
    source = torch.Generator().manual_seed(5)
    trainer = Trainer(SmallConvNet(), make_images(97, source), make_images(40, source), 4)
    trainer.fit()
    return {"weights": trainer.model.state_dict(), "log": trainer.log}


if __name__ == "__main__":
    outcome = main()
