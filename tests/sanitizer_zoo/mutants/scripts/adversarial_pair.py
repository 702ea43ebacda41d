"""A generator against a discriminator: two optimizers, fakes detached where they must be."""

import torch
import torch.nn.functional as F
from torch import nn


def make_generator():
    return nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))


def make_discriminator():
    return nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))


def real_points(count):
    angle = torch.rand(count) * 6.2832
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


@torch.no_grad()
def distance_to_ring(generator, noise):
    generator.eval()
    distance = (generator(noise).norm(dim=1) - 1).abs().mean().item()
    generator.train()
    return distance


def main(updates=40, batch=24):
    torch.manual_seed(77)
    generator, discriminator = make_generator(), make_discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    ones, zeros = torch.ones(batch), torch.zeros(batch)
    fixed_noise = torch.randn(32, 4)
    d_total, g_total, distances = 0.0, 0.0, []
    for update in range(updates):
        real = real_points(batch)
        fake = generator(torch.randn(batch, 4))

        optimizer_d.zero_grad()
        on_real = discriminator(real).squeeze(1)
        on_fake = discriminator(fake.detach()).squeeze(1)
        loss_d = F.binary_cross_entropy_with_logits(on_real, ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(on_fake, zeros)
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        fooled = discriminator(fake).squeeze(1)
        loss_g = F.binary_cross_entropy_with_logits(fooled, ones)
        loss_g.backward()
        nn.utils.clip_grad_norm_(generator.parameters(), 0.05)
        optimizer_g.step()

        d_total += loss_d.item()
        g_total += loss_g.detach()
        if update % 10 == 9:
            distances.append(distance_to_ring(generator, fixed_noise))
    weights = {"g": generator.state_dict(), "d": discriminator.state_dict()}
    return {"weights": weights, "totals": (d_total, g_total), "distances": distances}


if __name__ == "__main__":
    outcome = main()
