"""What does not fit is refused with words; nothing hangs and nothing is answered by torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from faults.runs_for_faults import INPUTS, LABELS, TARGETS, fit
from surefoot.core.errors import DataError, ModelError, RequestError
from surefoot.data.collate import collate_samples
from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.task import FunctionTask


def test_an_input_of_a_wrong_width_names_batch_layer_and_samples(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        fit(tmp_path, nn.Linear(4, 3), (INPUTS, LABELS), ClassificationTask(3))
    assert "float32[4, 3]" in caught.value.what
    assert "Linear(in_features=4, out_features=3" in caught.value.where
    assert "samples 2, 6, 7, 13" in caught.value.where


def test_an_input_of_a_wrong_number_type_names_it_in_an_evaluation_too(tmp_path: Path) -> None:
    wrong = (INPUTS.double(), TARGETS)
    with pytest.raises(ModelError, match=r"float64\[4, 3\]"):
        fit(tmp_path, validation=wrong)


class WithOwnError(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise ValueError("my own words")


def test_an_error_of_the_users_own_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="my own words"):
        fit(tmp_path, WithOwnError(3, 1))


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.norm(inputs))


def test_what_a_layer_of_torch_says_of_a_batch_of_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="more than 1 value per channel") as caught:
        fit(tmp_path, WithNorm(), train={"micro_batch": 1})
    assert "BatchNorm1d(3" in caught.value.where


def test_data_without_any_label_ends_in_an_error_not_in_an_endless_run(tmp_path: Path) -> None:
    ignored = torch.full((20,), -100)
    with pytest.raises(DataError, match="no window of a whole epoch carries any weight"):
        fit(tmp_path, nn.Linear(3, 3), (INPUTS, ignored), ClassificationTask(3))


def test_a_few_windows_without_a_label_are_skipped_for_ever(tmp_path: Path) -> None:
    mostly = torch.where(torch.arange(20) < 16, -100, LABELS)
    result = fit(
        tmp_path,
        nn.Linear(3, 3),
        (INPUTS, mostly),
        ClassificationTask(3),
        train={"micro_batch": 2, "horizon": "12 steps"},
    )
    assert result.step == 12


class Stream:
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        while self.place < 8:
            self.place += 1
            yield INPUTS[self.place], TARGETS[self.place]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_stream_is_no_validation_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a stream"):
        fit(tmp_path, validation=Stream())


def test_a_validation_set_has_a_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a validation set is called 1"):
        fit(tmp_path, validation={1: (INPUTS, TARGETS)})


@dataclass
class Pair:
    inputs: Tensor
    target: Tensor
    note: str | None = None


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Pair:
        return Pair(INPUTS[index], LABELS[index])


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_may_be_data_classes(tmp_path: Path, workers: int) -> None:
    result = fit(
        tmp_path,
        nn.Linear(3, 3),
        Pairs(),
        ClassificationTask(3),
        validation=Pairs(),
        loader={"workers": workers},
    )
    plain = fit(
        tmp_path,
        nn.Linear(3, 3),
        (INPUTS, LABELS),
        ClassificationTask(3),
        validation=(INPUTS, LABELS),
    )
    assert result.metrics.keys() == plain.metrics.keys()


def test_data_classes_are_collated_wherever_they_stand() -> None:
    pairs = [Pair(INPUTS[i], LABELS[i]) for i in range(4)]
    batch = collate_samples([{"pair": pair, "both": (pair, i)} for i, pair in enumerate(pairs)])
    assert torch.equal(batch["pair"].inputs, INPUTS[:4]) and batch["pair"].note is None
    assert torch.equal(batch["both"][0].target, LABELS[:4])
    assert torch.equal(batch["both"][1], torch.arange(4))
    assert torch.equal(collate_samples([1, 2]), torch.tensor([1, 2]))


def test_a_term_without_an_item_adds_nothing_to_the_evaluated_loss(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        scores = model(batch[0])
        return {"a": (scores - batch[1]).pow(2).sum(), "b": (scores * 0).sum()}

    def weight(batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {"a": float(len(batch[0])), "b": 0.0}

    task = FunctionTask(loss, weight)
    metrics = fit(tmp_path, task=task, validation=(INPUTS, TARGETS)).metrics
    assert metrics["validation/loss"] == metrics["validation/loss/a"]
    assert metrics["validation/loss/b"] != metrics["validation/loss/b"]  # NaN: nothing measured.


def test_a_metric_does_not_take_the_place_of_the_tasks_own(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="may not be called 'accuracy'"):
        fit(
            tmp_path,
            nn.Linear(3, 3),
            (INPUTS, LABELS),
            ClassificationTask(3),
            validation=(INPUTS, LABELS),
            metrics={"accuracy": lambda model, batch: (model(batch[0]).sum(), 1.0)},
        )


def test_a_metric_that_is_no_sum_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="metric 'm' returned a pair with tensors of shape"):
        fit(
            tmp_path,
            validation=(INPUTS, TARGETS),
            metrics={"m": lambda model, batch: (model(batch[0]), 4.0)},
        )


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_a_wrapped_model_is_refused_before_its_prefix_is_saved(tmp_path: Path, wrap) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match="the model is wrapped in"):
        fit(tmp_path, wrap(nn.Linear(3, 1)))


@pytest.mark.parametrize(("name", "expected"), [("_Net", "net"), ("Ünï", "n"), ("Ä", "model")])
def test_any_class_name_makes_a_run_name(tmp_path: Path, name: str, expected: str) -> None:
    folder = fit(tmp_path, type(name, (nn.Linear,), {})(3, 1)).folder
    assert folder is not None and folder.name.split("_", 1)[1] == expected


def test_a_model_in_evaluation_mode_is_refused_where_that_changes_the_training(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()
    with pytest.raises(ModelError, match="in evaluation mode, also Dropout 1"):
        fit(tmp_path, model)
    assert list(tmp_path.iterdir()) == []
    model.train()
    model[1].eval()
    assert fit(tmp_path, model).step == 6 and not model[1].training
    assert fit(tmp_path, nn.Linear(3, 1).eval()).step == 6


@pytest.mark.parametrize(
    "section", [{"early_stopping": {"kind": "on"}}, {"schedule": {"kind": "plateau"}}]
)
def test_what_watches_a_metric_needs_a_validation_set(tmp_path: Path, section: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(RequestError, match="there is no validation set"):
        fit(tmp_path, **section)
    assert list(tmp_path.iterdir()) == []


class Nothings(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> None:
        return None


def test_samples_that_are_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be collated into one batch"):
        fit(tmp_path, data=Nothings())
