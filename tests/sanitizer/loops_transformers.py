"""A language model under the Trainer of transformers; `own` computes the loss, `bug` wrongly."""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

BUG = "bug" in sys.argv


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random text."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(4, 60, (size, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


class Smoothed(Trainer):
    """Label smoothing by hand."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        scores = outputs.logits[:, :-1].flatten(0, 1)
        targets = inputs["labels"][:, 1:].flatten()
        if BUG:
            scores = scores.softmax(-1)
        loss = F.cross_entropy(scores, targets, label_smoothing=0.1)  # the bug
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8,
        num_train_epochs=3,
        use_cpu=True,
        report_to=[],
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=4,
        disable_tqdm=True,
        weight_decay=0.01,
    )
    kind = Smoothed if BUG or "own" in sys.argv else Trainer
    kind(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Tokens(128, 0),
        eval_dataset=Tokens(32, 1),
    ).train()


if __name__ == "__main__":
    main()
