"""The residual network."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from surefoot.core.errors import ModelError
from surefoot.models.resnet import ResNet, ResNetConfig


def build(**changes) -> ResNet:
    torch.manual_seed(0)
    fields = {"in_channels": 1, "num_classes": 4, "widths": (4, 8), "blocks_per_stage": 1}
    return ResNet(ResNetConfig(**(fields | changes)))


def test_parameters_of_resnet50():
    with torch.device("meta"):
        model = ResNet(ResNetConfig.resnet50())
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
@pytest.mark.parametrize("stem", ["small", "large"])
@pytest.mark.parametrize("size", [8, 32])
def test_small_pictures_go_through(block, stem, size):
    model = build(block=block, stem=stem)
    assert model(torch.randn(3, 1, size, size)).shape == (3, 4)


def test_stages_halve_the_picture():
    model = build(widths=(4, 8, 16), blocks_per_stage=(1, 2, 1))
    hidden = model.stem(torch.randn(2, 1, 8, 8))
    shapes = []
    for block in model.blocks:
        hidden = block(hidden)
        shapes.append(list(hidden.shape[1:]))
    assert shapes == [[4, 8, 8], [8, 4, 4], [8, 4, 4], [16, 2, 2]]


def test_blocks_begin_as_the_identity():
    model = build(blocks_per_stage=2)
    hidden = torch.randn(2, 4, 8, 8).relu()
    assert torch.equal(model.blocks[1](hidden), hidden)


def test_a_block_adds_its_input():
    block = build().blocks[0]
    torch.nn.init.normal_(block.last_norm.weight)
    hidden = torch.randn(2, 4, 8, 8)
    block.eval()
    assert torch.equal(block(hidden), F.relu(hidden + block.branch(hidden)))


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_gradients_are_those_of_the_function(block):
    model = build(widths=(2, 3), num_classes=2, block=block, activation="silu").double()
    for inner in model.blocks:
        torch.nn.init.normal_(inner.last_norm.weight)
    inputs = torch.randn(3, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    names, values = zip(*model.named_parameters(), strict=True)
    values = tuple(value.detach().clone().requires_grad_() for value in values)

    def scores(given, *weights):
        return functional_call(model, dict(zip(names, weights, strict=True)), (given,))

    assert torch.autograd.gradcheck(scores, (inputs, *values), fast_mode=True)


def test_tells_simple_pictures_apart():
    torch.manual_seed(1)
    labels = torch.arange(32) % 4
    pictures = 0.3 * torch.randn(32, 1, 8, 8)
    rows = torch.arange(8).view(8, 1) % 2
    patterns = (rows.expand(8, 8), rows.mT.expand(8, 8), rows ^ rows.mT, torch.zeros(8, 8))
    for place, label in enumerate(labels.tolist()):
        pictures[place, 0] += patterns[label]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
    assert (model.eval()(pictures).argmax(-1) == labels).all()


def test_initial_loss_is_that_of_guessing():
    model = build(widths=(16, 32))
    loss = F.cross_entropy(model(torch.randn(16, 1, 8, 8)), torch.arange(16) % 4)
    assert loss.item() == pytest.approx(1.386, abs=0.05)


def test_wrong_shapes_are_refused():
    with pytest.raises(ModelError, match=r"shape \[2, 8, 8\]") as caught:
        build()(torch.randn(2, 8, 8))
    assert caught.value.rule == "[batch, 1, height, width]"
    with pytest.raises(ModelError, match=r"shape \[2, 3, 8, 8\]"):
        build()(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize(
    "changes",
    [{"blocks_per_stage": (1,)}, {"widths": ()}, {"widths": (0, 4)}, {"dropout": 1.0}],
)
def test_impossible_shapes_are_refused(changes):
    with pytest.raises(ModelError, match="no residual network"):
        build(**changes)
