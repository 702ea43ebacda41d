"""How far weights move, and which units are dead or saturated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.numerics.measures import UnitWatch, copies, update_ratio


def test_the_ratio_is_that_of_the_whole_vector() -> None:
    before = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    after = [torch.tensor([3.0, 0.3]), torch.tensor([[4.4]])]
    assert float(update_ratio(before, after)) == pytest.approx(0.1)
    parameter = nn.Parameter(torch.ones(2))
    (copy,) = copies([parameter])
    assert torch.equal(copy, parameter) and copy is not parameter and not copy.requires_grad


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu, self.tanh, self.sigmoid = nn.ReLU(), nn.Tanh(), nn.Sigmoid()


def test_a_unit_is_dead_where_no_item_of_the_window_wakes_it() -> None:
    model = Rectified()
    watch = UnitWatch(model)
    with watch.watching():
        model.relu(torch.tensor([[-1.0, -1.0, 2.0, -3.0]]))
        model.relu(torch.tensor([[-1.0, 4.0, 2.0, -3.0]]))
    shares = watch.shares()
    assert shares.keys() == {"dead_units"} and float(shares["dead_units"]) == 0.5
    with watch.watching():
        model.relu(torch.ones(2, 4))
    assert float(watch.shares()["dead_units"]) == 0.0
    # Outside, nothing is looked at.
    model.relu(-torch.ones(2, 4))
    assert float(watch.shares()["dead_units"]) == 0.0


def test_units_of_pictures_are_channels_and_of_sequences_the_last_axis() -> None:
    model = Rectified()
    watch = UnitWatch(model)
    pictures = torch.ones(2, 4, 3, 3)
    pictures[:, 0] = -1
    with watch.watching():
        model.relu(pictures)
    assert float(watch.shares()["dead_units"]) == 0.25
    sequences = torch.ones(2, 7, 5)
    sequences[..., 0] = -1
    with watch.watching():
        model.relu(sequences)
    assert float(watch.shares()["dead_units"]) == pytest.approx(0.2)


def test_saturated_is_near_the_ends() -> None:
    model = Rectified()
    watch = UnitWatch(model)
    with watch.watching():
        model.tanh(torch.tensor([0.0, 9.0, -9.0, 1.0]))
        model.sigmoid(torch.tensor([0.0, 9.0, -9.0, -1.0]))
    assert float(watch.shares()["saturated_units"]) == 0.5
    assert not UnitWatch(nn.Linear(1, 1)).shares()
