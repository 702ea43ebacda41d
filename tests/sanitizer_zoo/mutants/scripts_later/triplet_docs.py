"""A triplet loss on padded documents: masked averages of word vectors, a warm-up, and an EMA of the weights."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

PAD, WORDS, TOPICS, EPOCHS, WARM_UP = 0, 30, 5, 5, 5


class DocumentEncoder(nn.Module):
    def __init__(self, width=24, outputs=12):
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.drop = nn.Dropout(0.2)
        self.hidden = nn.Linear(width, width)
        self.project = nn.Linear(width, outputs)

    def forward(self, tokens, mask):
        states = torch.relu(self.hidden(self.drop(self.words(tokens))))
        weights = mask.unsqueeze(-1).float()
        pooled = (states * weights).sum(dim=1) / weights.sum(dim=1)
        return nn.functional.normalize(self.project(pooled), dim=-1)


def make_triplets(count, word_odds):
    triplets = []
    for _ in range(count):
        topic, other = torch.randperm(TOPICS)[:2].tolist()
        odds, lengths = word_odds[[topic, topic, other]], torch.randint(4, 13, (3,)).tolist()
        drawn = [torch.multinomial(row, size, replacement=True) for row, size in zip(odds, lengths, strict=True)]
        triplets.append([words + 1 for words in drawn])
    return triplets


def collate(triplets):
    padded = [pad_sequence(part, batch_first=True, padding_value=PAD) for part in zip(*triplets, strict=True)]
    return [(tokens, tokens != PAD) for tokens in padded]


def train_epoch(model, averaged, loader, criterion, optimizer, scheduler):
    model.train()
    total = 0.0
    for batch in loader:
        anchor, positive, negative = [model(tokens, mask) for tokens, mask in batch]
        loss = criterion(anchor, positive, negative)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
        total += loss.item() * len(anchor)
    return total / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader, criterion):
    model.eval()
    total = 0.0
    for batch in loader:
        anchor, positive, negative = [model(tokens, mask) for tokens, mask in batch]
        total += criterion(anchor, positive, negative).item() * len(anchor)
    return total / len(loader.dataset)


torch.manual_seed(23)
word_odds = torch.softmax(1.3 * torch.randn(TOPICS, WORDS - 1), dim=1)
train_loader = DataLoader(make_triplets(184, word_odds), batch_size=16, shuffle=True, collate_fn=collate)
val_loader = DataLoader(make_triplets(80, word_odds), batch_size=40, collate_fn=collate)
model = DocumentEncoder()
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
criterion = nn.TripletMarginLoss(margin=0.4)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
updates = EPOCHS * len(train_loader)
factors = [min((update + 1) / WARM_UP, 1 - update / updates) for update in range(updates + 1)]
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: factors[update])

train_curve, val_curve, ema_curve = [], [], [evaluate(averaged, val_loader, criterion)]
for _ in range(EPOCHS):
    train_curve.append(train_epoch(model, averaged, train_loader, criterion, optimizer, scheduler))
    val_curve.append(evaluate(model, val_loader, criterion))
    ema_curve.append(evaluate(averaged, val_loader, criterion))

print("train", [round(value, 3) for value in train_curve])
print("validation", [round(value, 3) for value in val_curve])
print("validation of the average", [round(value, 3) for value in ema_curve])
outcome = [model.state_dict(), averaged.state_dict(), train_curve, val_curve, ema_curve]
