# %% A small student learns from a larger teacher on noisy rings; the student's last epochs are averaged (SWA).
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(88)
CLASSES, HEAT = 3, 2.0

# %% Data
labels, angles = torch.randint(CLASSES, (384,)), 6.2832 * torch.rand(384)
radii = 0.6 + 0.7 * labels + 0.15 * torch.randn(384)
points = torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1)
val_points, val_labels = points[232:308], labels[232:308]
test_points, test_labels = points[308:], labels[308:]
loader = DataLoader(TensorDataset(points[:232], labels[:232]), batch_size=40, shuffle=True, drop_last=True)


# %% Models
def perceptron(width, dropout):
    first = [nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)]
    second = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Linear(width, CLASSES))


def score(model, points, labels):
    model.eval()
    with torch.inference_mode():
        logits = model(points)
    accuracy = (logits.argmax(dim=1) == labels).float().mean().item()
    return F.cross_entropy(logits, labels).item(), accuracy


# %% The teacher, with a plateau and early stopping
teacher = perceptron(48, dropout=0.2)
optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
teacher_curve, best, waited = [], copy.deepcopy(teacher.state_dict()), 0
while len(teacher_curve) < 5 and waited < 2:
    teacher.train()
    for batch_points, batch_labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(teacher(batch_points), batch_labels)
        loss.backward()
        optimizer.step()
    val_loss, _ = score(teacher, val_points, val_labels)
    plateau.step(val_loss)
    waited = 0 if val_loss < min(teacher_curve, default=float("inf")) else waited + 1
    best = copy.deepcopy(teacher.state_dict()) if waited == 0 else best
    teacher_curve.append(val_loss)
teacher.load_state_dict(best)
teacher.requires_grad_(False).eval()

# %% The student, under bfloat16 autocast, averaged over its last three epochs
student = perceptron(16, dropout=0.0)
averaged = AveragedModel(student)
optimizer = torch.optim.AdamW(student.parameters(), lr=1.5e-2, weight_decay=1e-3)
steady = SWALR(optimizer, swa_lr=5e-3, anneal_epochs=2)
student_curve, val_curve = [], []
for epoch in range(7):
    student.train()
    epoch_total = 0.0
    for batch_points, batch_labels in loader:
        with torch.no_grad():
            wanted = F.softmax(teacher(batch_points) / HEAT, dim=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = student(batch_points).float()
        soft_loss = F.kl_div(F.log_softmax(logits / HEAT, dim=1), wanted, reduction="batchmean")
        loss = 0.7 * HEAT**2 * soft_loss + 0.3 * F.cross_entropy(logits, batch_labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_total += loss.item()
    if epoch >= 4:
        averaged.update_parameters(student)
        steady.step()
    student_curve.append(epoch_total / len(loader))
    val_curve.append(score(student, val_points, val_labels)[0])

# %% Results
update_bn(loader, averaged)
swa_loss, swa_accuracy = score(averaged, test_points, test_labels)
print("teacher validation", [round(value, 3) for value in teacher_curve])
print("student train", [round(v, 3) for v in student_curve], "validation", [round(v, 3) for v in val_curve])
print("averaged student test", round(swa_loss, 3), round(swa_accuracy, 3))
outcome = [student.state_dict(), averaged.state_dict(), teacher_curve, student_curve, val_curve, swa_loss, swa_accuracy]
