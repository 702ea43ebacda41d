"""A student learns from a teacher: softened classes by KL divergence, and the labels."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(31)
TEMPERATURE, ALPHA = 2.0, 0.7

inputs = torch.randn(160, 10)
labels = (inputs[:, :4] + inputs[:, 4:8]).argmax(1)
train_x, train_y = inputs[:128], labels[:128]
test_x, test_y = inputs[128:], labels[128:]

teacher = nn.Sequential(
    nn.Linear(10, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4)
)
student = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(size=16):
    order = torch.randperm(len(train_x))
    for rows in order.split(size):
        yield train_x[rows], train_y[rows]


def accuracy(model):
    model.eval()
    with torch.no_grad():
        value = (model(test_x).argmax(1) == test_y).float().mean().item()
    model.train()
    return value


# The teacher first.
teacher_optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
for _ in range(3):
    for x, y in batches():
        teacher_optimizer.zero_grad()
        loss = F.cross_entropy(teacher(x), y)
        loss.backward()
        teacher_optimizer.step()

teacher.requires_grad_(False)
teacher.eval()

# Then the student.
optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
results = []
for _ in range(4):
    for x, y in batches():
        with torch.no_grad():
            teacher_logits = teacher(x)
        student_logits = student(x)
        log_student = F.log_softmax(student_logits / TEMPERATURE, dim=1)
        soft_teacher = F.softmax(teacher_logits / TEMPERATURE, dim=1)
        soft_loss = F.kl_div(log_student, soft_teacher, reduction="batchmean") * TEMPERATURE**2
        hard_loss = F.cross_entropy(student_logits, y)
        loss = ALPHA * soft_loss + (1 - ALPHA) * hard_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 0.4)
        optimizer.step()
    results.append(accuracy(student))

outcome = {"student": student.state_dict(), "teacher": teacher.state_dict(), "results": results}
