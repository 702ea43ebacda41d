"""What one sample costs: our decoders by formula, every other model as torch counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.assembly.flop_count import counted_flops, decoder_flops, sample_flops
from surefoot.config.load import load_recipe, resolve_settings
from surefoot.core.errors import RequestError
from surefoot.data.sources.base import Source
from surefoot.data.sources.datasets import as_source
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.observe.metrics_log import read_rows
from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.task import FunctionTask
from surefoot.trainer import Trainer

IDS = torch.zeros(8, 16, dtype=torch.long)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_the_formula_of_a_decoder_counts_vectors_too(tied: bool, positions: Any) -> None:
    shape = GPTConfig(
        vocabulary_size=64, sequence_length=16, num_layers=2, num_heads=2, num_kv_heads=1,
        embedding_dim=32, feedforward_dim=48, tied=tied, positions=positions,
    )  # fmt: skip
    model = GPT(shape)
    counted = counted_flops(
        model, GenerationTask(64), as_source({"input_ids": IDS, "labels": IDS}), 4
    )
    # The weights and biases of norms take part in no product; the formula counts them as if.
    vectors = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 1)
    assert counted.value == decoder_flops(model) - 6 * vectors * 16


def of_rows(*shape: int) -> Source:
    return as_source((torch.randn(12, *shape), torch.zeros(12, dtype=torch.long)))


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))


def settings(**sections: Any) -> Any:
    plain = {"train": {"horizon": "4 steps", "micro_batch": 5}, "device": "cpu"}
    return resolve_settings({**plain, **sections}).config


def test_another_model_is_counted() -> None:
    task, source = ClassificationTask(3), of_rows(1, 8, 8)
    found = counted_flops(network(), task, source, 5)
    # The image needs no gradient.
    assert found.value == 2 * (2 * 4 * 36 * 9 + 3 * 144 * 3)


def test_a_loss_over_pairs_costs_what_it_does_in_the_batch_of_the_training() -> None:
    def pairs(model: nn.Module, batch: Any) -> Tensor:
        embedded = model(batch[0])
        return (embedded @ embedded.T).sum()

    def value(micro_batch: int) -> float:
        source = of_rows(6)
        found = counted_flops(nn.Linear(6, 4), FunctionTask(pairs), source, micro_batch).value
        assert found is not None
        return found

    # A product with every sample of the batch, and two for its gradient.
    assert [value(size) for size in (1, 12)] == [96 + 3 * 2 * 4 * size for size in (1, 12)]


class Lengths(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of which the fourth is shorter."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.zeros(15 if index == 3 else 16, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}


def test_samples_of_several_sizes_have_no_one_cost() -> None:
    found = counted_flops(nn.Embedding(4, 4), GenerationTask(4), as_source(Lengths()), 2)
    assert (found.value, found.unknown) == (None, "samples are of several sizes")


def fails(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("not so")


def test_what_fails_is_said_and_leaves_no_trace() -> None:
    model, source = network(), of_rows(1, 8, 8)
    before = torch.get_rng_state()
    found = counted_flops(model, FunctionTask(fails), source, 5)
    assert (found.value, found.unknown) == (None, "ValueError: not so")
    found = counted_flops(model, ClassificationTask(3), as_source(Lengths()), 5)
    assert found.value is None
    assert found.unknown
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_is_counted_where_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    task, source = ClassificationTask(3), of_rows(1, 8, 8)

    def known(**sections: Any) -> bool:
        return sample_flops(network(), task, source, settings(**sections)).value is not None

    assert not known()
    assert known(train={"horizon": "1e9 FLOPs", "micro_batch": 5})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not known()
    assert known(device="auto")


def trained(tmp_path: Path, task: Any, horizon: str) -> list[dict[str, Any]]:
    asked = {
        "train": {"horizon": horizon, "micro_batch": 5},
        "log": {"console": "off"},
        "schedule": {"kind": "constant"},
        "device": "cpu",
    }
    data = (torch.randn(12, 1, 8, 8), torch.zeros(12, dtype=torch.long))
    folder = Trainer(network(), data, task, settings=asked, runs=tmp_path).fit().folder
    assert folder is not None
    return [row for row in read_rows(folder / "metrics.jsonl") if row["row"] == "step"]


def test_a_run_may_be_as_long_as_a_number_of_operations(tmp_path: Path) -> None:
    # 7776 operations a sample, 5 and at the end of an epoch 2 samples an update.
    assert len(trained(tmp_path, ClassificationTask(3), "1e5 FLOPs")) == 4
    with pytest.raises(RequestError, match="operations of a sample are not known: ValueError"):
        trained(tmp_path, FunctionTask(fails), "1e5 FLOPs")


def test_the_recipes_that_come_along_are_counted() -> None:
    from surefoot.assembly.material import prepare_material

    for name in ("diabetes-mlp", "digits-cnn"):
        recipe = load_recipe(name).recipe
        material = prepare_material(recipe).material
        found = counted_flops(material.model, material.task, material.train, 8)
        assert found.value, found.unknown
