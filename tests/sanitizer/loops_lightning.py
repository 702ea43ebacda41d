"""A module and trainer of Lightning as its documentation has them; `bug` plants a bug."""

import sys
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BUG = "bug" in sys.argv
DEVICES = 2 if "ddp" in sys.argv else 1


class AutoEncoder(pl.LightningModule):
    """Encodes, decodes, compares."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        )
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(self.encoder(x))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        out = self(x)
        if BUG:
            return F.mse_loss(out[:, 0], x[:, :1])  # the bug
        loss = F.mse_loss(out, x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.log("val_loss", F.mse_loss(self(x), x), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def main() -> None:
    torch.set_num_threads(1)
    pl.seed_everything(0)
    train = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=16)
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=DEVICES,
        strategy="ddp" if DEVICES > 1 else "auto",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="lightning",
    )
    trainer.fit(AutoEncoder(), train, val)


if __name__ == "__main__":
    main()
