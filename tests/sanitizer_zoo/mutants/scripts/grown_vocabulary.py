"""A pretrained language model gets more words: new tied embeddings, the first block frozen."""

import torch
import torch.nn.functional as F
from torch import nn

OLD_WORDS, NEW_WORDS, WIDTH, LENGTH = 24, 32, 16, 10


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        h = self.norm(x)
        mixed, _ = self.attention(h, h, h, attn_mask=mask, need_weights=False)
        return x + self.out(torch.relu(mixed))


class WordModel(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.mixers = nn.ModuleList([Mixer(), Mixer()])
        self.decoder = nn.Linear(WIDTH, words)

    def forward(self, ids):
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
        x = self.embedding(ids)
        for mixer in self.mixers:
            x = mixer(x, mask)
        return self.decoder(x)


def sentences(count, words, source):
    rows = [torch.randint(0, words, (count,), generator=source)]
    for _ in range(LENGTH):
        step = torch.randint(1, 4, (count,), generator=source)
        rows.append((rows[-1] * 5 + step) % words)
    return torch.stack(rows, dim=1)


def epoch(model, optimizer, data):
    losses = []
    for batch in data[torch.randperm(len(data))].split(16):
        optimizer.zero_grad()
        log_probabilities = F.log_softmax(model(batch[:, :-1]), dim=-1)
        loss = F.nll_loss(log_probabilities.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(66)
    source = torch.Generator().manual_seed(2)
    pretrained = WordModel(OLD_WORDS)
    nn.init.normal_(pretrained.embedding.weight, std=0.1)
    first = torch.optim.Adam(pretrained.parameters(), lr=5e-3)
    curve = epoch(pretrained, first, sentences(96, OLD_WORDS, source))

    model = WordModel(OLD_WORDS)
    model.load_state_dict(pretrained.state_dict())
    for parameter in model.parameters():
        parameter.requires_grad = False
    embedding, decoder = nn.Embedding(NEW_WORDS, WIDTH), nn.Linear(WIDTH, NEW_WORDS)
    nn.init.normal_(embedding.weight, std=0.1)
    embedding.weight.data[:OLD_WORDS] = model.embedding.weight.data
    model.embedding = embedding
    model.decoder = decoder
    for parameter in model.mixers[1].parameters():
        parameter.requires_grad = True
    model.decoder.weight = model.embedding.weight
    optimizer = torch.optim.Adam(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=3e-3
    )
    data = sentences(96, NEW_WORDS, source)
    for _ in range(3):
        curve += epoch(model, optimizer, data)
    return {"weights": model.state_dict(), "curve": curve}


if __name__ == "__main__":
    outcome = main()
