"""Metrics: sums first, one division at the end."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.core.errors import ModelError
from surefoot.tasks.metrics import MetricTotals, correct_sum, ratios


def test_batches_of_different_size_give_the_mean_of_all_items():
    totals = MetricTotals()
    totals.add({"loss": (torch.tensor(9.0), 3.0), "accuracy": (torch.tensor(1), torch.tensor(3))})
    totals.add({"loss": (torch.tensor(1.0), 1.0), "accuracy": (torch.tensor(1), torch.tensor(1))})
    assert totals.ratios() == {"loss": 2.5, "accuracy": 0.5}
    assert totals.denominator("loss") == 4.0
    assert totals.names == ("loss", "accuracy")
    assert totals.stacked().tolist() == [[10.0, 4.0], [2.0, 4.0]]


def test_totals_are_wide():
    totals = MetricTotals()
    for _ in range(3):
        totals.add({"loss": (torch.tensor(2.0**24), 1.0)})
        totals.add({"loss": (torch.tensor(1.0), 1.0)})
    assert totals.stacked().tolist() == [[3 * 2.0**24 + 3, 6.0]]


def test_what_was_added_stays_as_it_was():
    totals = MetricTotals()
    loss = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    totals.add({"loss": (loss, 1.0)})
    totals.add({"loss": (loss, 1.0)})
    assert loss.item() == 2.0
    assert not totals.stacked().requires_grad


def test_nothing_measured_is_not_a_number():
    assert MetricTotals().ratios() == {}
    totals = MetricTotals()
    totals.add({"loss": (torch.tensor(0.0), 0.0)})
    assert math.isnan(totals.ratios()["loss"])


def test_terms_add_up_to_the_loss():
    totals = MetricTotals()
    totals.add({"loss/a": (torch.tensor(6.0), 2.0), "loss/b": (torch.tensor(1.0), 4.0)})
    assert totals.ratios() == {"loss": 3.25, "loss/a": 3.0, "loss/b": 0.25}
    assert totals.denominator("loss") == 2.0
    assert ratios({"accuracy": (1.0, 2.0)}) == {"accuracy": 0.5}


def test_names_may_not_change():
    totals = MetricTotals()
    totals.add({"loss": (torch.tensor(1.0), 1.0)})
    with pytest.raises(ModelError, match="follow metrics"):
        totals.add({"loss": (torch.tensor(1.0), 1.0), "accuracy": (torch.tensor(1.0), 1.0)})


def test_correct_items_are_counted():
    scores = torch.tensor([[3.0, 2, 1], [1, 2, 3], [2, 3, 1], [3, 2, 1]])
    labels = torch.tensor([0, 1, 2, -100])
    assert correct_sum(scores, labels).item() == 1
    for k, hits in ((1, 1), (2, 2), (3, 3)):
        assert correct_sum(scores, labels, top_k=k).item() == hits
        assert correct_sum(scores.view(2, 2, 3), labels.view(2, 2), top_k=k).item() == hits


def test_adding_waits_for_no_device():
    totals = MetricTotals()
    for _ in range(2):
        totals.add({"loss": (torch.zeros((), device="meta"), torch.ones((), device="meta"))})
        assert totals.stacked().is_meta
