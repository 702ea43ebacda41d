"""Tasks on a GPU: no wait for the device, and the numbers of the CPU."""

from __future__ import annotations

import pytest
import torch

from host_sync import no_host_sync
from surefoot.models import GPT, MLP, GPTConfig, MLPConfig
from surefoot.tasks import ClassificationTask, GenerationTask, MultilabelTask, RegressionTask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cases():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 16), generator=generator)
    features = torch.randn(8, 6, generator=generator)
    weights = torch.tensor([0.5, 2.0, 1.0])
    shape = {"vocabulary_size": 32, "sequence_length": 16, "num_layers": 2, "num_heads": 4}
    llama = GPTConfig.llama(**shape, num_kv_heads=2, embedding_dim=64)
    gpt2 = GPTConfig.gpt2(**shape, embedding_dim=64)
    mlp = MLP(MLPConfig(in_features=6, hidden=(8,), out_features=3))
    task = GenerationTask(32, bytes_per_token=torch.arange(32))
    classes = torch.tensor([0, 2, -100, 1, 1, 0, -100, 2])
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1])
    return {
        "llama": (task, GPT(llama), {"input_ids": ids, "labels": ids}),
        "documents": (task, GPT(llama), {"input_ids": ids, "document_ids": ids.cumsum(1) // 99}),
        "gpt2": (task, GPT(gpt2), {"input_ids": ids}),
        "classes": (
            ClassificationTask(3, label_smoothing=0.1, class_weights=weights, top_k=(2,)),
            mlp,
            (features, classes),
        ),
        "numbers": (
            RegressionTask("huber"),
            mlp,
            {"inputs": features, "target": features[:, :3], "target_mask": mask},
        ),
        "labels": (
            MultilabelTask(3, positive_weights=weights),
            mlp,
            {"inputs": features, "target": (features[:, :3] > 0).float(), "target_mask": mask},
        ),
    }


def on_gpu(batch):
    if isinstance(batch, dict):
        return {name: value.cuda() for name, value in batch.items()}
    return tuple(value.cuda() for value in batch)


CASES = pytest.mark.parametrize("case", list(cases()))


@CASES
def test_nothing_waits_for_the_device(case):
    task, model, batch = cases()[case]
    model, batch = model.cuda(), on_gpu(batch)

    def everything():
        with torch.autocast("cuda", torch.bfloat16):
            loss = task.loss_sum(model, batch)
            task.metric_sums(model, batch)
        loss.backward()

    everything()  # Constants are copied once, kernels are loaded.
    torch.cuda.synchronize()
    with no_host_sync():
        everything()


@CASES
def test_numbers_are_those_of_the_cpu(case):
    task, model, batch = cases()[case]
    model = model.double()
    batch = (
        {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        if isinstance(batch, dict)
        else tuple(v.double() if v.is_floating_point() else v for v in batch)
    )
    expected = task.metric_sums(model, batch)
    found = task.metric_sums(model.cuda(), on_gpu(batch))
    for name, pair in expected.items():
        assert [float(v) for v in found[name]] == pytest.approx([float(v) for v in pair], rel=1e-9)
