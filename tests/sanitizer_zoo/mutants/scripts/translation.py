"""A sequence to a sequence: two GRUs, padding, clipping, and a plateau on the validation loss."""

import torch
from torch import nn

torch.manual_seed(51)
PAD, START, WORDS, WIDTH = 0, 1, 26, 20


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, source):
        return self.gru(self.words(source))[1]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.drop = nn.Dropout(0.15)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, words, state):
        states, _ = self.gru(self.drop(self.words(words)), state)
        return self.scores(states)


def examples(count):
    lengths = torch.randint(4, 10, (count,))
    source = torch.randint(2, WORDS, (count, 9))
    source[torch.arange(9) >= lengths[:, None]] = PAD
    wanted = torch.where(source == PAD, PAD, (source * 3 + 1) % (WORDS - 2) + 2)
    start = torch.full((count, 1), START)
    return source, torch.cat([start, wanted], dim=1)


source, target = examples(120)
training = list(zip(source[:96].split(12), target[:96].split(12), strict=True))
validation = list(zip(source[96:].split(12), target[96:].split(12), strict=True))
encoder, decoder = Encoder(), Decoder()
optimizer = torch.optim.Adam(list(encoder.parameters()) + list(decoder.parameters()), lr=6e-3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)


def loss_of(source, target):
    inputs, wanted = target[:, :-1], target[:, 1:]
    scores = decoder(inputs, encoder(source))
    return criterion(scores.flatten(0, 1), wanted.flatten())


train_curve, val_curve = [], []
for _ in range(5):
    encoder.train()
    decoder.train()
    epoch_total = 0.0
    for index in torch.randperm(len(training)).tolist():
        loss = loss_of(*training[index])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 0.05)
        nn.utils.clip_grad_norm_(decoder.parameters(), 0.3)
        optimizer.step()
        epoch_total += loss.item()
    encoder.eval()
    decoder.eval()
    with torch.no_grad():
        losses = [loss_of(*batch) for batch in validation]
    val_loss = torch.stack(losses).mean().item()
    plateau.step(val_loss)
    train_curve.append(epoch_total)
    val_curve.append(val_loss)

weights = {"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}
outcome = {"weights": weights, "train": train_curve, "val": val_curve}
