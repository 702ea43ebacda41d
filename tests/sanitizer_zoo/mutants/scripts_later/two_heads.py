"""A backbone learnt on one task, then frozen under two new heads: a rare class and a real number, in bfloat16."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(65)
INPUTS, WIDTH, WINDOW = 12, 32, 3


def make_batches(*tensors):
    return lambda: [[tensor[index] for tensor in tensors] for index in torch.randperm(len(tensors[0])).split(16)]


def make_head(outputs):
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, outputs))


def make_pretraining(backbone, head, batches):
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=1e-2)

    def run_epoch():
        backbone.train()
        total, epoch_batches = 0.0, batches()
        for features, kinds in epoch_batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(head(backbone(features)), kinds)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / len(epoch_batches)

    return run_epoch


def make_tuning(backbone, heads, class_weights, batches, held_out):
    backbone.requires_grad_(False).eval()
    groups = [{"params": heads["rare"].parameters()}, {"params": heads["value"].parameters(), "lr": 1e-2}]
    optimizer = torch.optim.Adam(groups, lr=5e-3)

    def losses(features, rare, value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = backbone(features)
            logits, forecast = heads["rare"](hidden).float(), heads["value"](hidden).float()
        return F.cross_entropy(logits, rare, weight=class_weights), F.mse_loss(forecast.squeeze(-1), value)

    def run_epoch():
        heads.train()
        total, epoch_batches = 0.0, batches()
        for first in range(0, len(epoch_batches), WINDOW):
            window = epoch_batches[first : first + WINDOW]
            optimizer.zero_grad()
            for batch in window:
                loss = sum(losses(*batch))
                (loss / len(window)).backward()
                total += loss.item()
            optimizer.step()
        return total / len(epoch_batches)

    def validate():
        heads.eval()
        with torch.no_grad():
            return sum(losses(*held_out)).item()

    return run_epoch, validate


features = torch.randn(576, INPUTS)
causes = torch.tanh(2 * features @ torch.randn(INPUTS, 2) / INPUTS**0.5)
kinds = (causes > 0).long() @ torch.tensor([2, 1])
rare = (causes.sum(dim=1) > 0.9).long()
value = causes[:, 0] - 0.7 * causes[:, 1] + 0.1 * torch.randn(len(causes))
source, train, unseen = slice(0, 160), slice(160, 416), slice(416, None)
value = (value - value[train].mean()) / value[train].std()
counts = torch.bincount(rare[train])
backbone = nn.Sequential(nn.Linear(INPUTS, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, WIDTH), nn.ReLU())
heads = nn.ModuleDict({"rare": make_head(2), "value": make_head(1)})
pretrain_epoch = make_pretraining(backbone, nn.Linear(WIDTH, 4), make_batches(features[source], kinds[source]))
pretrain_curve = [pretrain_epoch() for _ in range(3)]
batches = make_batches(features[train], rare[train], value[train])
held_out = features[unseen], rare[unseen], value[unseen]
tune_epoch, validate = make_tuning(backbone, heads, counts.sum() / (2 * counts), batches, held_out)
train_curve, val_curve = [], [validate()]
for _ in range(5):
    train_curve.append(tune_epoch())
    val_curve.append(validate())

print("train", [round(loss, 3) for loss in pretrain_curve], [round(loss, 3) for loss in train_curve])
print("validation", [round(loss, 3) for loss in val_curve])
outcome = [backbone.state_dict(), heads.state_dict(), pretrain_curve, train_curve, val_curve]
