"""A convolutional VAE on small binary images, saved half way and resumed by a second trainer."""

import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS, LATENT = 6, 4


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        first, last = nn.Conv2d(1, 12, 3, stride=2, padding=1, bias=False), nn.ConvTranspose2d(12, 1, 4, 2, padding=1)
        narrow, widen = nn.Linear(12 * 16, 2 * LATENT), nn.Linear(LATENT, 12 * 16)
        self.encoder = nn.Sequential(first, nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), narrow)
        self.decoder = nn.Sequential(widen, nn.Unflatten(1, (12, 4, 4)), nn.BatchNorm2d(12), nn.ReLU(), last)

    def forward(self, images):
        mean, log_var = self.encoder(images).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * torch.exp(0.5 * log_var)), mean, log_var


class Trainer:
    def __init__(self, train_loader, val_loader):
        self.model, self.train_loader, self.val_loader = VAE(), train_loader, val_loader
        decayed = [weight for weight in self.model.parameters() if weight.ndim > 1]
        plain = [weight for weight in self.model.parameters() if weight.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 1e-2}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        steps = EPOCHS * len(train_loader)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=2e-2, total_steps=steps)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.train_curve, self.val_curve = [], []

    def loss(self, images):
        logits, mean, log_var = self.model(images)
        pixels = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(dim=(1, 2, 3))
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(dim=1)
        return (pixels + divergence).mean()

    def fit(self, until):
        while len(self.val_curve) < until:
            self.model.train()
            total = 0.0
            for (images,) in self.train_loader:
                self.optimizer.zero_grad()
                loss = self.loss(images)
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                total += loss.item()
            self.train_curve.append(total / len(self.train_loader))
            self.val_curve.append(self.evaluate())

    @torch.inference_mode()
    def evaluate(self):
        self.model.eval()
        total = sum(self.loss(images).item() * len(images) for (images,) in self.val_loader)
        return total / len(self.val_loader.dataset)

    def save(self, path):
        kept = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({**kept, "curves": [self.train_curve, self.val_curve]}, path)

    def load(self, path):
        kept = torch.load(path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(kept[name])
        self.train_curve, self.val_curve = kept["curves"]


torch.manual_seed(3)
starts, sizes = torch.cartesian_prod(torch.arange(5), torch.arange(2, 5))[:, :, None].unbind(1)
bars = ((torch.arange(8) >= starts) & (torch.arange(8) < starts + sizes)).float()
rectangles = (bars[:, None, :, None] * bars[None, :, None, :]).reshape(-1, 1, 8, 8)
train_set, val_set = random_split(TensorDataset(rectangles), [170, 55])
loaders = DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True), DataLoader(val_set, batch_size=25)
starter, trainer = Trainer(*loaders), Trainer(*loaders)
starter.fit(until=EPOCHS // 2)
with tempfile.TemporaryDirectory() as folder:
    starter.save(f"{folder}/vae.pt")
    trainer.load(f"{folder}/vae.pt")
trainer.fit(until=EPOCHS)
model, train_curve, val_curve = trainer.model, trainer.train_curve, trainer.val_curve
print("train", [round(value, 2) for value in train_curve])
print("validation", [round(value, 2) for value in val_curve])
outcome = [model.state_dict(), train_curve, val_curve]
