"""Sentences of different lengths for an LSTM: padding, windows weighted by their tokens."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PAD, VOCABULARY, WINDOW = 0, 30, 2


class SentenceModel(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        states, _ = self.lstm(self.embedding(ids))
        return self.out(self.drop(states))


def make_sentences(count, source):
    sentences = []
    for _ in range(count):
        word, sentence = source.randrange(1, VOCABULARY), []
        for _ in range(source.randrange(4, 14)):
            sentence.append(word)
            word = (word * 7 + source.choice([1, 2, 5])) % (VOCABULARY - 1) + 1
        sentences.append(torch.tensor(sentence))
    return sentences


def batches_of(sentences, size):
    for start in range(0, len(sentences), size):
        yield pad_sequence(sentences[start : start + size], batch_first=True, padding_value=PAD)


def windows_of(sentences, size):
    window = []
    for batch in batches_of(sentences, size):
        window.append(batch)
        if len(window) == WINDOW:
            yield window
            window = []
    if window:
        yield window


def perplexity(model, sentences):
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in batches_of(sentences, 8):
            inputs, targets = batch[:, :-1], batch[:, 1:]
            logits = model(inputs)
            total += F.cross_entropy(
                logits.transpose(1, 2), targets, ignore_index=PAD, reduction="sum"
            ).item()
            count += (targets != PAD).sum().item()
    model.train(was_training)
    return total / count


def main():
    torch.manual_seed(0)
    source = random.Random(4)
    training, held_out = make_sentences(88, source), make_sentences(24, source)
    model = SentenceModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    curve = []
    for _epoch in range(3):
        source.shuffle(training)
        for window in windows_of(training, 8):
            num_tokens = sum((batch[:, 1:] != PAD).sum() for batch in window)
            optimizer.zero_grad()
            for batch in window:
                inputs, targets = batch[:, :-1], batch[:, 1:]
                logits = model(inputs)
                loss_sum = F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
                )
                loss = loss_sum / num_tokens
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        curve.append(perplexity(model, held_out))
    return {"weights": model.state_dict(), "curve": curve}


if __name__ == "__main__":
    outcome = main()
