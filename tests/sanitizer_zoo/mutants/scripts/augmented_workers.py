"""Two loader workers, each augmenting with its own numpy generator."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __init__(self, count, train):
        source = np.random.default_rng(3 if train else 4)
        self.signals = source.normal(size=(count, 12)).astype(np.float32)
        self.labels = (self.signals[:, :6].sum(1) > self.signals[:, 6:].sum(1)).astype(np.int64)
        self.train = train
        self.random = np.random.default_rng(0)

    def reseed(self, seed):
        self.random = np.random.default_rng(seed)

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        signal = self.signals[index]
        if self.train:
            noise = self.random.normal(scale=0.1, size=signal.shape)
            signal = signal + noise.astype(np.float32)
        return torch.from_numpy(signal), int(self.labels[index])


def seed_worker(worker_id):
    torch.utils.data.get_worker_info().dataset.reseed(torch.initial_seed() % 2**32)


def main():
    torch.manual_seed(12)
    train_loader = DataLoader(
        Augmented(64, train=True),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        worker_init_fn=seed_worker,
        generator=torch.Generator().manual_seed(2),
    )
    test_loader = DataLoader(Augmented(32, train=False), batch_size=16)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    history = []
    for _epoch in range(3):
        model.train()
        for signals, labels in train_loader:
            optimizer.zero_grad()
            output = model(signals)
            loss = loss_function(output, labels)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            tested = [loss_function(model(x), y).item() for x, y in test_loader]
        history.append(sum(tested) / len(tested))
    return {"weights": model.state_dict(), "history": history}


if __name__ == "__main__":
    outcome = main()
