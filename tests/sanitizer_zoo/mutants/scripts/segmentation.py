"""Labels for every pixel: an encoder and a decoder with BatchNorm, a rate per update, weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Noisy rectangles on noise."""

    def __init__(self, count, seed):
        source = torch.Generator().manual_seed(seed)
        self.images = 0.4 * torch.randn(count, 1, 12, 12, generator=source)
        self.masks = torch.zeros(count, 12, 12, dtype=torch.long)
        corners = torch.randint(1, 7, (count, 2), generator=source)
        for index, (row, column) in enumerate(corners.tolist()):
            self.images[index, 0, row : row + 4, column : column + 4] += 1.0
            self.masks[index, row : row + 4, column : column + 4] = 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


class Segmenter(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.middle = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(2)])
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.drop = nn.Dropout2d(0.1)
        self.classify = nn.Conv2d(width, 2, 1)

    def forward(self, images):
        x = self.down(images)
        for layer in self.middle:
            x = x + F.gelu(layer(x))
        return self.classify(self.drop(F.relu(self.up(x))))


def run(num_epochs=4, device="cpu"):
    torch.manual_seed(7)
    train_loader = DataLoader(Shapes(60, seed=1), batch_size=12, shuffle=True)
    val_loader = DataLoader(Shapes(24, seed=2), batch_size=12)
    net = Segmenter().to(device)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    total = num_epochs * len(train_loader)
    decay = torch.optim.lr_scheduler.PolynomialLR(sgd, total_iters=total, power=0.9)
    balance = torch.tensor([0.4, 1.6])
    results = []
    for _epoch in range(num_epochs):
        net.train()
        for images, masks in train_loader:
            sgd.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(images), masks, weight=balance)
            loss.backward()
            sgd.step()
            decay.step()
        net.eval()
        overlap, union = 0, 0
        with torch.no_grad():
            for images, masks in val_loader:
                guess = net(images).argmax(1)
                overlap += ((guess == 1) & (masks == 1)).sum().item()
                union += ((guess == 1) | (masks == 1)).sum().item()
        results.append(overlap / max(union, 1))
    return {"weights": net.state_dict(), "results": results}


if __name__ == "__main__":
    outcome = run()
