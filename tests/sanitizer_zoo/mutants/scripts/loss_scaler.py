"""Half precision with a gradient scaler: an autoencoder whose gradients are small."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(11)
device = "cpu"
NUM_SAMPLES, WIDTH, BATCH = 64, 48, 16


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        # Centred signals of some millivolts: no biases.
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False)
        )
        self.decoder = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, WIDTH, bias=False)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


mixing = torch.randn(6, WIDTH)
data = 1e-3 * (torch.randn(NUM_SAMPLES, 6) @ mixing)
held_out = 1e-3 * (torch.randn(32, 6) @ mixing)

model = Autoencoder().to(device=device, dtype=torch.float32)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=1000, enabled=True)

curve = []
for _epoch in range(5):
    model.train()
    order = torch.randperm(NUM_SAMPLES)
    for rows in order.split(BATCH):
        batch = data[rows]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            rebuilt = model(batch)
            loss = F.mse_loss(rebuilt, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e-6)
        scaler.step(optimizer)
        scaler.update()
        curve.append(loss.item())
    model.eval()
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        curve.append(F.mse_loss(model(held_out), held_out).item())

outcome = {"weights": model.state_dict(), "curve": curve}
