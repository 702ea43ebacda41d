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


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_equals_the_published_model(kind):
    transformers = pytest.importorskip("transformers")
    ours = build(in_channels=3, stem="large", block=kind, blocks_per_stage=(2, 1)).double().eval()
    outs = [width * (4 if kind == "bottleneck" else 1) for width in (4, 8)]
    config = transformers.ResNetConfig(
        num_channels=3,
        embedding_size=4,
        hidden_sizes=outs,
        depths=[2, 1],
        layer_type=kind,
        num_labels=4,
    )
    theirs = transformers.ResNetForImageClassification(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    for value in ours.state_dict().values():
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
            value.add_(0.3 * noise)
    # Theirs lists the shortcut of a block before its branch.
    parts = [ours.stem]
    for block in ours.blocks:
        parts += [block.shortcut, block.branch]
    source = [value for part in (*parts, ours.head) for value in part.state_dict().values()]
    names = theirs.state_dict()
    theirs.load_state_dict(dict(zip(names, source, strict=True)))
    pictures = torch.randn(2, 3, 37, 50, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(ours(pictures), theirs(pictures).logits, rtol=1e-10, atol=1e-10)


def test_starts_as_published():
    model = build(widths=(32, 64), blocks_per_stage=2)
    first, second = (model.blocks[n].branch[0].weight for n in (1, 2))
    assert first.var().item() == pytest.approx(2 / (9 * 32), rel=0.05)
    assert second.var().item() == pytest.approx(2 / (9 * 64), rel=0.05)
    assert model.head.weight.std().item() == pytest.approx(0.01, rel=0.2)
    for value in model.state_dict().values():
        value.fill_(7)
    torch.manual_seed(0)
    model.reset_parameters()
    expected = build(widths=(32, 64), blocks_per_stage=2)
    torch.manual_seed(0)
    expected.reset_parameters()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_usual_values():
    config = ResNetConfig(in_channels=1, num_classes=10)
    assert (config.widths, config.depths) == ((32, 64, 128), (2, 2, 2))


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
    with pytest.raises(ModelError, match="a residual network cannot"):
        build(**changes)
