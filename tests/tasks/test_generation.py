"""Next-token prediction: one shift, and the weight that goes with it."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from surefoot.core.errors import DataError, ModelError
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.tasks.generation import GenerationTask, tokens_and_labels
from surefoot.tasks.losses import sequence_cross_entropy_sum

TASK = GenerationTask(8)
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])


class Oracle(nn.Module):
    """Predicts, with certainty, that the next token is this one plus `step`."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, input_ids):
        return 50.0 * F.one_hot((input_ids + self.step) % 8, 8).float()


def test_the_label_is_the_next_token():
    right, copying, late = (
        TASK.metric_sums(Oracle(step), {"input_ids": IDS}) for step in (1, 0, 2)
    )
    assert right["loss"][0].item() == pytest.approx(0.0, abs=1e-6)
    assert right["accuracy"] == (6, 6)
    for wrong in (copying, late):
        assert wrong["loss"][0].item() == pytest.approx(300.0)
        assert wrong["accuracy"] == (0, 6)


def test_the_weight_counts_labels_from_the_second_on():
    labels = IDS.clone()
    labels[0, 0] = -100
    assert TASK.weight({"input_ids": IDS}) == 6
    assert TASK.weight({"input_ids": IDS, "labels": labels}) == 6
    labels[1, 2] = -100
    assert TASK.weight({"input_ids": IDS, "labels": labels}) == 5
    assert TASK.weight({"input_ids": IDS[:, :1]}) == 0
    assert TASK.weight({"input_ids": IDS, "labels": torch.full_like(IDS, -100)}) == 0


def test_left_out_labels_bear_no_loss():
    labels = IDS.clone()
    labels[1] = -100
    batch = {"input_ids": IDS, "labels": labels}
    assert TASK.loss_sum(Oracle(0), batch).item() == pytest.approx(150.0)
    assert TASK.metric_sums(Oracle(1), batch)["accuracy"] == (3, 3)
    labels[:] = -100
    assert TASK.loss_sum(Oracle(0), batch).item() == 0.0


@pytest.mark.parametrize("batch", [{"input_ids": IDS}, IDS, (IDS,), (IDS, IDS), [IDS, IDS]])
def test_batches_of_every_kind(batch):
    assert TASK.weight(batch) == 6
    assert TASK.loss_sum(Oracle(0), batch).item() == pytest.approx(300.0)


def test_without_labels_pads_and_first_tokens_of_documents_do_not_count():
    attention = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    documents = torch.tensor([[0, 0, 1, 1], [3, 3, 3, 3]])
    assert tokens_and_labels({"input_ids": IDS, "attention_mask": attention})[1].tolist() == [
        [1, 2, 3, -100],
        [5, 6, 7, 0],
    ]
    both = {"input_ids": IDS, "attention_mask": attention, "document_ids": documents}
    assert tokens_and_labels(both)[1].tolist() == [[1, 2, -100, -100], [5, 6, 7, 0]]
    assert TASK.weight(both) == 4
    assert tokens_and_labels({**both, "labels": IDS})[1] is IDS
    assert tokens_and_labels({"input_ids": IDS, "document_ids": documents})[1].tolist() == [
        [1, 2, -100, 4],
        [5, 6, 7, 0],
    ]


def test_padding_changes_neither_weight_nor_loss():
    torch.manual_seed(0)
    config = GPTConfig.gpt2(
        vocabulary_size=8, sequence_length=9, num_layers=1, num_heads=2, embedding_dim=8
    )
    model = GPT(config).double()
    padded = {
        "input_ids": F.pad(IDS, (0, 5)),
        "labels": F.pad(IDS, (0, 5), value=-100),
    }
    assert TASK.weight(padded) == TASK.weight(IDS)
    torch.testing.assert_close(
        TASK.loss_sum(model, padded), TASK.loss_sum(model, IDS), rtol=1e-12, atol=0
    )


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    lengths = torch.tensor([9, 9, 1, 2, 3, 9, 1, 4])
    task = GenerationTask(8, bytes_per_token=lengths)
    labels = IDS.clone()
    labels[1, 2] = -100
    batch = {"input_ids": IDS, "labels": labels}
    bits, num_bytes = task.metric_sums(Oracle(0), batch)["bits_per_byte"]
    assert num_bytes == 1 + 2 + 3 + 1 + 9
    assert bits.item() == pytest.approx(5 * 50.0 / math.log(2))
    assert "bits_per_byte" not in TASK.metric_sums(Oracle(0), batch)
    with pytest.raises(ModelError, match=r"shape \[8\]"):
        GenerationTask(9, bytes_per_token=lengths)


@pytest.mark.parametrize(("place", "value"), [((1, 2), 8), ((0, 3), -1), ((1, 0), -100)])
def test_a_token_out_of_range_is_named(place, value):
    ids = IDS.clone()
    ids[place] = value
    with pytest.raises(DataError, match=f"input_ids holds {value}") as caught:
        TASK.weight({"input_ids": ids})
    assert caught.value.batch_position == place[0]
    assert f"batch position {place[0]}, place [{place[1]}]" in caught.value.where
    assert caught.value.rule == "0 <= index < 8"


def test_a_label_out_of_range_is_named():
    labels = IDS.clone()
    labels[1, 1] = 9
    with pytest.raises(DataError, match="labels holds 9") as caught:
        TASK.weight({"input_ids": IDS, "labels": labels})
    assert caught.value.batch_position == 1
    assert "-100" in caught.value.rule


def test_labels_that_are_shifted_already_are_refused():
    shifted = F.pad(IDS[:, 1:], (0, 1), value=-100)
    with pytest.raises(DataError, match="shifted already"):
        TASK.weight({"input_ids": IDS, "labels": shifted})
    with pytest.raises(DataError, match="shifted already"):
        TASK.weight((IDS[:, :-1], IDS[:, 1:]))
    holes = shifted.clone()
    holes[:, 1] = -100
    with pytest.raises(DataError, match="shifted already"):
        TASK.weight({"input_ids": IDS, "labels": holes})
    same = torch.full((2, 4), 3)
    labels = same.clone()
    labels[0, 1] = -100
    assert TASK.weight({"input_ids": same, "labels": labels}) == 5
    masked = torch.full_like(IDS, -100)
    assert TASK.weight({"input_ids": IDS, "labels": masked}) == 0
    assert TASK.weight({"input_ids": IDS[:, :1], "labels": IDS[:, :1]}) == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": IDS[0]}, r"input_ids: \[4\]"),
        ({"tokens": IDS}, "not there"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, r"labels: \[2, 3\]"),
        ({"input_ids": IDS.float()}, "float32"),
        ({"input_ids": IDS, "labels": IDS.float()}, "float32"),
        ({"input_ids": IDS, "labels": 3}, "labels: int"),
    ],
)
def test_wrong_batches_are_named(batch, message):
    with pytest.raises(DataError, match=message) as caught:
        TASK.weight(batch)
    assert caught.value.rule


def test_scores_of_the_last_place_only_are_refused():
    class Last(nn.Module):
        def forward(self, input_ids):
            return torch.zeros(input_ids.shape[0], 1, 8)

    with pytest.raises(ModelError, match=r"shape \[2, 1, 8\]") as caught:
        TASK.loss_sum(Last(), {"input_ids": IDS})
    assert "[2, 4, 8]" in caught.value.rule


def test_a_compiled_loss_is_the_same_loss(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function: compiled.append(function) or (lambda *a: function(*a) * 1),
    )
    task = GenerationTask(8, compile_loss=True)
    assert compiled == [sequence_cross_entropy_sum]
    assert torch.equal(task.loss_sum(Oracle(0), IDS), TASK.loss_sum(Oracle(0), IDS))
    assert task.metric_sums(Oracle(0), IDS) == TASK.metric_sums(Oracle(0), IDS)
    copy = pickle.loads(pickle.dumps(task))
    assert copy.compile_loss
    assert copy.weight(IDS) == 6
    assert not pickle.loads(pickle.dumps(TASK)).compile_loss


def test_a_target_mask_leaves_tokens_out():
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[True] * 6, [True, True, True, False, False, True]])
    batch = {"input_ids": ids, "target_mask": mask}
    assert GenerationTask(16).weight(batch) == 8.0
    assert GenerationTask(16).weight({"input_ids": ids, "target_mask": mask.all(1)}) == 5.0
    with pytest.raises(DataError, match="target_mask has shape"):
        GenerationTask(16).weight({"input_ids": ids, "target_mask": mask[:, :3]})
