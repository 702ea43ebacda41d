"""A variational autoencoder: two terms, a weight that rises, averaged weights for the test."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Variational(nn.Module):
    def __init__(self, inputs=12, hidden=24, latent=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.05))
        self.mean = nn.Linear(hidden, latent)
        self.log_variance = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, inputs)
        )

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def terms(model, x):
    rebuilt, mean, log_variance = model(x)
    rebuild_loss = F.mse_loss(rebuilt, x, reduction="none").sum(1).mean()
    spread_loss = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()
    return rebuild_loss, spread_loss


class Experiment:
    epochs = 5

    def __init__(self):
        torch.manual_seed(88)
        self.model = Variational()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        data = torch.randn(128, 3) @ torch.randn(3, 12) + 0.1 * torch.randn(128, 12)
        training, testing = random_split(TensorDataset(data), [96, 32])
        self.loader = DataLoader(training, batch_size=16, shuffle=True)
        self.test_loader = DataLoader(testing, batch_size=32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 4], gamma=0.3)
        self.history = []

    def fit(self):
        for epoch in range(self.epochs):
            self.model.train()
            running = 0.0
            for (x,) in self.loader:
                rebuild_loss, spread_loss = terms(self.model, x)
                weight = min(1.0, (epoch + 1) / 3)
                self.optimizer.zero_grad()
                (rebuild_loss + weight * spread_loss).backward()
                nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.average.update_parameters(self.model)
                running += rebuild_loss.item()
            self.schedule.step()
            self.history.append((running, self.test()))

    @torch.no_grad()
    def test(self):
        self.average.eval()
        return sum(terms(self.average, x)[0].item() for (x,) in self.test_loader)


experiment = Experiment()
experiment.fit()
outcome = {"weights": experiment.average.state_dict(), "history": experiment.history}
