"""Fine-tuning: a pretrained backbone with BatchNorm stays frozen, a new head learns."""

import torch
import torch.nn.functional as F
from torch import nn


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_1 = nn.Conv1d(1, 8, 3, padding=1)
        self.norm_1 = nn.BatchNorm1d(8)
        self.conv_2 = nn.Conv1d(8, 8, 3, padding=1)
        self.norm_2 = nn.BatchNorm1d(8)

    def forward(self, x):
        x = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(x))).mean(-1)


class Classifier(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def signals(count, num_classes, generator):
    labels = torch.randint(0, num_classes, (count,), generator=generator)
    waves = torch.sin(torch.arange(24) * (labels[:, None] + 1) * 0.4)
    return (waves + 0.5 * torch.randn(count, 24, generator=generator))[:, None], labels


def fit(model, optimizer, inputs, labels, epochs, freeze_backbone):
    for _ in range(epochs):
        model.train()
        if freeze_backbone:
            model.backbone.eval()
        for rows in torch.randperm(len(inputs)).split(16):
            loss = F.cross_entropy(model(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def measure(model, inputs, labels):
    model.eval()
    with torch.no_grad():
        logits = model(inputs)
    return F.cross_entropy(logits, labels).item()


def main():
    torch.manual_seed(8)
    generator = torch.Generator().manual_seed(1)
    model = Classifier(5)
    inputs, labels = signals(96, 5, generator)
    fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), inputs, labels, 3, False)

    for parameter in model.parameters():
        parameter.requires_grad = False
    model.head = nn.Linear(8, 3)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    inputs, labels = signals(80, 3, generator)
    test_inputs, test_labels = signals(32, 3, generator)
    results = []
    for _ in range(2):
        fit(model, optimizer, inputs, labels, epochs=2, freeze_backbone=True)
        results.append(measure(model, test_inputs, test_labels))
    return {"weights": model.state_dict(), "results": results}


if __name__ == "__main__":
    outcome = main()
