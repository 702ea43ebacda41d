"""Activations that wait on the host give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.small_runs import settings_of, small_gpt, train
from surefoot.config.load import resolve_settings
from surefoot.core.errors import ConfigError, RequestError
from surefoot.memory import offload
from surefoot.memory.offload import ActivationsOnHost, offload_blocks

CPU = torch.device("cpu")


class Counting(ActivationsOnHost):
    """Counts what goes to the host, and takes a copy as a device would."""

    gone: list[Tensor] = []  # noqa: RUF012
    back = 0

    def __init__(self, pin_memory: bool) -> None:
        super().__init__(pin_memory)
        to_host, from_host = self.pack_hook, self.unpack_hook

        def pack(tensor: Tensor) -> Any:
            packed = to_host(tensor)
            if isinstance(packed, Tensor):
                return packed
            Counting.gone.append(tensor.detach())
            return packed[0], packed[1].clone()

        def unpack(packed: Any) -> Tensor:
            Counting.back += not isinstance(packed, Tensor)
            return from_host(packed)

        self.pack_hook, self.unpack_hook = pack, unpack


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    monkeypatch.setattr(offload, "ActivationsOnHost", Counting)
    monkeypatch.setattr(Counting, "gone", [])
    monkeypatch.setattr(Counting, "back", 0)
    return Counting


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_same_bits(dropout: float, counting: type[Counting]) -> None:
    before = train("gpt", settings_of(), 4, torch.float32, dropout=dropout)
    assert counting.back == 0
    settings = settings_of(memory={"offload_activations": "cpu"})
    after = train("gpt", settings, 4, torch.float32, dropout=dropout)
    assert counting.back == len(counting.gone) > 100
    assert (after.losses, after.norms, after.metrics) == (
        before.losses,
        before.norms,
        before.metrics,
    )
    assert after.weights.keys() == before.weights.keys()
    assert all(torch.equal(after.weights[n], w) for n, w in before.weights.items())


def test_what_a_block_keeps_goes_and_weights_stay(counting: type[Counting]) -> None:
    ids = torch.randint(24, (4, 10), generator=torch.Generator().manual_seed(1))
    gradients = {}
    for where in ("here", "host"):
        torch.manual_seed(0)
        model = small_gpt()
        if where == "host":
            assert offload_blocks(model, CPU) == 2
        model(ids).square().sum().backward()
        gradients[where] = [p.grad for p in model.parameters()]
    pairs = zip(gradients["here"], gradients["host"], strict=True)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
    assert counting.back == len(counting.gone) > 20
    weights = {p.data_ptr() for p in model.parameters()}
    assert not any(tensor.data_ptr() in weights for tensor in counting.gone)
    gone = sum(tensor.numel() * tensor.element_size() for tensor in counting.gone)
    print(f"{gone} bytes of two blocks wait on the host")
    with torch.no_grad():
        model(ids)
    assert counting.back == len(counting.gone)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(RequestError, match="no repeated layers"):
        offload_blocks(nn.Linear(2, 2), CPU)


@pytest.mark.parametrize(
    ("sections", "rule"),
    [
        ({"memory": {"offload_activations": "nvme"}}, "offload to a drive is not supported"),
        (
            {"memory": {"offload_activations": "cpu", "recompute": "blocks"}},
            "memory.recompute is blocks",
        ),
        (
            {"memory": {"offload_activations": "cpu"}, "train": {"compile": "blocks"}},
            "train.compile is blocks",
        ),
        (
            {"memory": {"optimizer_in_backward": True}},
            "here train.clip_norm = 0.5, train.accumulation = 3",
        ),
        (
            {
                "memory": {"optimizer_in_backward": True},
                "train": {"clip_norm": "off", "accumulation": 1},
                "precision": {"dtype": "fp16"},
                "guard": {"non_finite": "skip"},
            },
            "here precision.dtype = fp16, guard.non_finite = skip",
        ),
    ],
)
def test_what_is_not_done_is_refused_with_the_reason(sections: dict[str, Any], rule: str) -> None:
    settings = settings_of()
    for name, changes in sections.items():
        settings[name] = {**settings.get(name, {}), **changes}
    with pytest.raises(ConfigError) as refused:
        resolve_settings(settings)
    assert rule in str(refused.value)
