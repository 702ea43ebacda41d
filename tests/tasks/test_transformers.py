"""Models of transformers, built from a configuration, under our tasks as they are."""

from __future__ import annotations

import pytest
import torch

from surefoot.tasks import ClassificationTask, GenerationTask, MultilabelTask, RegressionTask
from surefoot.tasks.calling import plan_call

transformers = pytest.importorskip("transformers")


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **changes,
    )
    return transformers.AutoModelForCausalLM.from_config(config).double()


def bert(num_labels: int):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=num_labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.AutoModelForSequenceClassification.from_config(config).double()


def padded_tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 32, (3, 9), generator=torch.Generator().manual_seed(1))
    attention = torch.ones_like(ids)
    for row, length in enumerate((9, 5, 3)):
        attention[row, length:] = 0
    return {"input_ids": ids * attention, "attention_mask": attention}


def test_generation_equals_the_models_own_loss():
    model, task = llama(), GenerationTask(32)
    batch = padded_tokens()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected = model(**batch, labels=labels).loss
    for form in (batch, {**batch, "labels": labels}, transformers.BatchEncoding(batch)):
        assert task.weight(form) == 8 + 4 + 2
        loss = task.loss_sum(model, form) / task.weight(form)
        # Their loss is computed in float32.
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0, check_dtype=False)


def test_one_batch_of_ragged_sequences_equals_one_at_a_time():
    model, task = llama(), GenerationTask(32)
    batch = padded_tokens()
    alone = sum(
        task.loss_sum(model, {"input_ids": batch["input_ids"][row : row + 1, :length]})
        for row, length in enumerate((9, 5, 3))
    )
    torch.testing.assert_close(task.loss_sum(model, batch), alone, rtol=1e-10, atol=0)


def test_no_labels_reach_the_model():
    batch = padded_tokens()
    plan = plan_call(llama(), {**batch, "labels": batch["input_ids"], "document_ids": None})
    assert set(plan.passed) == {"input_ids", "attention_mask"}
    assert plan.unused == ()


def test_no_cache_is_filled():
    model = llama()
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    GenerationTask(32).loss_sum(model, padded_tokens())
    assert seen[0].past_key_values is None
    assert seen[0].loss is None


def test_tuple_outputs_are_taken():
    class AsTuple(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask=None):
            return self.inner(input_ids, attention_mask).to_tuple()

    model, task = llama(), GenerationTask(32)
    expected = task.loss_sum(model, padded_tokens())
    assert torch.equal(task.loss_sum(AsTuple(model), padded_tokens()), expected)


def test_classification_equals_the_models_own_loss():
    model, task = bert(4), ClassificationTask(4)
    batch = {**padded_tokens(), "labels": torch.tensor([0, 3, 1])}
    loss = task.loss_sum(model, batch) / task.weight(batch)
    torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-12, atol=0)
    task.metric_sums(model, batch)


def test_a_pair_of_features_and_label_is_taken():
    batch = padded_tokens()
    labels = torch.tensor([0, 3, 1])
    task, model = ClassificationTask(4), bert(4)
    assert torch.equal(
        task.loss_sum(model, (batch, labels)), task.loss_sum(model, {**batch, "labels": labels})
    )


def test_regression_and_multilabel():
    batch = {**padded_tokens(), "labels": torch.tensor([0.5, 3.0, -1.0]).double()}
    model, task = bert(1), RegressionTask()
    loss = task.loss_sum(model, batch) / task.weight(batch)
    torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-12, atol=0)
    batch["labels"] = torch.tensor([[0, 1], [1, 1], [0, 0]]).double()
    model, multilabel = bert(2), MultilabelTask(2)
    loss = multilabel.loss_sum(model, batch) / multilabel.weight(batch)
    torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-12, atol=0)


def test_a_module_learns_through_a_task():
    model, task = llama().float(), GenerationTask(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = padded_tokens()
    for _ in range(40):
        optimizer.zero_grad()
        loss = task.loss_sum(model, batch) / task.weight(batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
