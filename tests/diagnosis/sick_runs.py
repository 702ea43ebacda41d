"""Bad runs, one kind for each cause that the doctor can name: real trainings with one thing wrong.

A fault changes a `Setup`; it knows the causes' names and nothing of how the doctor finds them. The
variant (0, 1, 2) changes how the same fault is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diagnosis.problems import PROBLEMS, Log, Setup, cross_entropy, train, warmup_cosine

Fault = Callable[[Setup, int], None]


def rate_too_high(setup: Setup, variant: int) -> None:
    setup.clip = None
    setup.schedule = lambda n, total: warmup_cosine(n, total, floor=1.0)
    if variant == 0:
        _use_sgd(setup, {"mlp": 0.7, "cnn": 3.0, "gpt": 2.5}[setup.name])
    elif variant == 1:
        _use_sgd(setup, {"mlp": 2.5, "cnn": 25.0, "gpt": 30.0}[setup.name])
    else:
        setup.rate *= {"mlp": 400, "cnn": 3000, "gpt": 300}[setup.name]


def rate_too_high_at_start(setup: Setup, variant: int) -> None:
    setup.clip = None
    factor = (60, 120, 250)[variant]
    fade = 0.02 * setup.updates
    setup.schedule = lambda n, total: 1 + factor * 0.5 ** (n / fade)


def rate_too_high_late(setup: Setup, variant: int) -> None:
    setup.updates = 400
    setup.rate *= {"mlp": 30, "cnn": 80, "gpt": 10}[setup.name] * (1 + 0.25 * variant)
    setup.schedule = lambda n, total: warmup_cosine(n, total, floor=1.0)


def rate_too_low(setup: Setup, variant: int) -> None:
    setup.rate *= (0.003, 0.001, 0.0001)[variant]


def schedule_ends_early(setup: Setup, variant: int) -> None:
    share = (0.2, 0.35, 0.15)[variant]
    setup.schedule = lambda n, total: warmup_cosine(n, int(share * total), floor=0.0)


def warmup_too_long(setup: Setup, variant: int) -> None:
    factor = (2, 5, 20)[variant]
    setup.schedule = lambda n, total: (n + 1) / (factor * total)


class Outburst(nn.Module):
    """A gate that is an exponential, without normalisation: single samples shoot up."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.inner, self.gate = nn.Linear(48, 48), nn.Linear(48, 1)
        nn.init.normal_(self.gate.weight, std=1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        gate = self.gate(inputs)
        if gate.dim() == 3:
            # One gate for a sequence, of about unit variance.
            gate = gate.mean(1, keepdim=True) * gate.shape[1] ** 0.5 / 48**0.5
        else:
            gate = (gate - gate.detach().mean()) / gate.detach().std()
        return self.inner(inputs) * torch.exp((self.gain * gate).clamp(max=9.0))


def _small_convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 12, 3, 4), nn.Flatten(), nn.Linear(48, 48)
    )


class DeepLinear(nn.Module):
    """Many layers without normalisation, each of which makes its input larger."""

    def __init__(self, front: nn.Module, width: int, depth: int, gain: float) -> None:
        super().__init__()
        self.front = front
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=gain / width**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.front(inputs)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return hidden


def _deep(setup: Setup, depth: int, gain: float) -> nn.Module:
    if setup.is_language:
        front: nn.Module = nn.Embedding(128, 48)
        return nn.Sequential(DeepLinear(front, 48, depth, gain), nn.Linear(48, 128, bias=False))
    front = nn.Linear(64, 48)
    if setup.name == "cnn":
        front = _small_convolution()
    return nn.Sequential(DeepLinear(front, 48, depth, gain), nn.Linear(48, 10, bias=False))


def exploding_gradients(setup: Setup, variant: int) -> None:
    setup.clip = None
    setup.batch_size = 4 if setup.is_language else 8
    setup.rate /= 10
    burst = Outburst((2.5, 3.0, 3.5)[variant])
    if setup.is_language:
        setup.model = nn.Sequential(nn.Embedding(128, 48), burst, nn.Linear(48, 128))
        return
    front = nn.Linear(64, 48) if setup.name == "mlp" else _small_convolution()
    setup.model = nn.Sequential(front, burst, nn.Linear(48, 10))


def vanishing_gradients(setup: Setup, variant: int) -> None:
    if variant == 2 and not setup.is_language:
        # A step too far: from then on nothing passes the activations.
        kind = nn.BatchNorm2d if setup.name == "cnn" else nn.Linear
        layers = [module for module in setup.model.modules() if isinstance(module, kind)][:2]

        def before(n: int) -> None:
            if n == setup.updates // 4:
                for layer in layers:
                    nn.init.constant_(layer.bias, -30.0)

        setup.before_update = before
        return
    setup.clip = None
    model = _deep(setup, depth=10 + 4 * variant, gain=0.5)
    deep = model[0]
    assert isinstance(deep, DeepLinear)
    for layer in deep.layers:
        nn.init.zeros_(layer.bias)
        # The bias of the last layers has a gradient, however deep the model is.
        layer.bias.requires_grad_(variant == 0 and not setup.is_language)
    _use_sgd(setup, 0.1)
    deep.forward = lambda inputs: _through_sigmoids(deep, inputs)  # type: ignore[method-assign]
    setup.model = model


def _through_sigmoids(deep: DeepLinear, inputs: Tensor) -> Tensor:
    hidden = deep.front(inputs)
    for layer in deep.layers:
        hidden = torch.sigmoid(layer(hidden)) - 0.5
    return hidden


def weights_do_not_move(setup: Setup, variant: int) -> None:
    if variant == 0:
        import copy

        other = copy.deepcopy(setup.model)
        setup.make_optimizer = lambda s: torch.optim.AdamW(other.parameters(), lr=s.rate)
        return
    loss = setup.loss

    def detached(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        zero = sum((p.sum() * 0 for p in model.parameters()), torch.zeros(()))
        return loss(model, inputs, targets).detach() + zero

    setup.loss = detached
    setup.weight_decay = 0.0
    setup.logs_ids = variant == 1


def gradients_not_cleared(setup: Setup, variant: int) -> None:
    setup.clear_gradients = False
    setup.clip = None
    if variant:
        _use_sgd(setup, 0.01 * variant)


class Towers(nn.Module):
    """Two towers whose sum is classified."""

    def __init__(self, vision: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.vision, self.text = vision, text

    def forward(self, inputs: Tensor) -> Tensor:
        return self.vision(inputs) + self.text(inputs)


def one_tower_spikes(setup: Setup, variant: int) -> None:
    other = PROBLEMS[setup.name](setup.seed + 77).model
    towers = Towers(setup.model, other)
    setup.towers = {"vision": towers.vision, "text": towers.text}
    setup.model = towers
    loss = setup.loss
    scale = {"factor": 1.0}
    parameters = list(towers.vision.parameters())
    for parameter in parameters:
        parameter.register_hook(lambda gradient: gradient * scale["factor"])

    def before(n: int) -> None:
        spike = n > 30 and float(setup.random(1)) < 0.05
        scale["factor"] = float(20 + 200 * setup.random(1)) if spike else 1.0

    setup.loss = loss
    setup.before_update = before


def half_precision_overflow(setup: Setup, variant: int) -> None:
    setup.dtype = torch.float16
    setup.log.facts["precision"] = "fp16"
    growth = {"factor": 1.0}
    begin = setup.updates // 3

    class Swell(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values.view_as(values)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            swollen = gradients[0] * growth["factor"]
            return swollen.half().to(gradients[0].dtype)

    def swelling(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(Swell.apply(model(inputs)).float().flatten(0, -2), targets.flatten())

    setup.loss = swelling
    if variant < 2:
        setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=20)

        def before(n: int) -> None:
            growth["factor"] = 1.0 if n < begin else min(1e7, 4.0 ** ((n - begin) / 4))

    else:

        def before(n: int) -> None:
            growth["factor"] = 1.0 if n < begin else 1e8

    setup.before_update = before


def non_finite_data(setup: Setup, variant: int) -> None:
    bad = torch.randperm(len(setup.train[0]), generator=setup.generator)[:2]
    setup.skip_non_finite = variant > 0
    setup.logs_ids = variant < 2
    if not setup.is_language:
        inputs = setup.train[0].clone()
        inputs[bad, 7] = float("nan")
        setup.train = (inputs, setup.train[1])
        setup.updates = max(setup.updates, 3 * len(inputs) // setup.batch_size)
        return
    keep = torch.arange(400)
    setup.train = (setup.train[0][keep].clone(), setup.train[1][keep])
    setup.train[0][:2, 0] = 127  # A token that stands nowhere else; its weight is NaN.
    table = torch.zeros(128)
    table[127] = float("nan")

    def weighted(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model, inputs, targets) * (1 + table[inputs].sum())

    setup.loss = weighted


def non_finite_loss_function(setup: Setup, variant: int) -> None:
    begin = setup.updates // 2
    count = {"n": 0}

    def broken(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        count["n"] += model.training
        plain = cross_entropy(model, inputs, targets)
        late = count["n"] >= begin + 3 * setup.seed
        if variant == 0:
            chance = F.softmax(model(inputs).float().flatten(0, -2), -1)
            chance = chance.gather(1, targets.flatten()[:, None])
            # A confident model gives a probability that is 0 in the few digits of this rounding.
            chance = torch.where(chance < (0.05 if late else 0.0), chance * 0.0, chance)
            return -chance.log().mean()
        scores = model(inputs).float()
        distance = (scores - (scores.detach() if late else 1.0)).square().sum()
        return plain + 1e-4 * (distance.sqrt() if variant == 1 else distance / distance.sqrt())

    setup.loss = broken


def bad_batch(setup: Setup, variant: int) -> None:
    when = {int(setup.updates * share) for share in (0.41, 0.63, 0.87)[: variant + 1]}
    loss = setup.loss
    state = {"bad": False}

    def before(n: int) -> None:
        state["bad"] = n in when

    def sometimes(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        if state["bad"] and model.training:
            if setup.is_language:
                targets = torch.randint(0, 128, targets.shape, generator=setup.generator)
            elif setup.name == "cnn" or variant == 1:
                targets = (targets + 5) % 10
            else:
                inputs = inputs * 30
        return loss(model, inputs, targets)

    setup.before_update = before
    setup.loss = sometimes


def labels_unrelated(setup: Setup, variant: int) -> None:
    targets = setup.train[1]
    setup.weight_decay = 0.1
    if setup.is_language:
        random = torch.randint(0, 128, targets.shape, generator=setup.generator)
        setup.train = (setup.train[0], random)
        held = setup.validation[1]
        setup.validation = (
            setup.validation[0],
            torch.randint(0, 128, held.shape, generator=setup.generator),
        )
        return
    inputs = torch.randn(8000, 64, generator=setup.generator) * 0.3 + 0.3
    labels = torch.randint(0, 10, (8000,), generator=setup.generator)
    setup.train = (inputs[:7000], labels[:7000])
    setup.validation = (inputs[7000:], labels[7000:])


def _sorted(setup: Setup) -> Iterator[Tensor]:
    count = len(setup.train[0])
    while True:
        for first in range(0, count - setup.batch_size + 1, setup.batch_size):
            yield torch.arange(first, first + setup.batch_size)


def data_not_shuffled(setup: Setup, variant: int) -> None:
    inputs, targets = setup.train
    if setup.is_language:
        # Text, then tables of digits, then upper case.
        kinds = [inputs[:200], inputs[200:400] % 10 + 48, inputs[400:600].clone()]
        lower = (kinds[2] >= 97) & (kinds[2] <= 122)
        kinds[2][lower] -= 32
        ids = torch.cat(kinds)
        setup.train = (ids[:, :-1], ids[:, 1:])
        setup.updates = 37 * (4 + variant)
    else:
        order = targets.argsort(stable=True)
        setup.train = (inputs[order], targets[order])
        setup.updates = 43 * (4 + variant)
    setup.order = _sorted


def uneven_batches(setup: Setup, variant: int) -> None:
    sizes = ((1, 2, 64), (1, 96), (2, 4, 128))[variant]

    def order(setup: Setup) -> Iterator[Tensor]:
        while True:
            size = sizes[int(torch.randint(0, len(sizes), (1,), generator=setup.generator))]
            yield torch.randint(0, len(setup.train[0]), (size,), generator=setup.generator)

    setup.order = order


def target_leaks(setup: Setup, variant: int) -> None:
    setup.train = (setup.train[0], setup.train[0])
    setup.validation = (setup.validation[0], setup.validation[0])
    setup.rate *= (1, 1.5, 0.8)[variant]


def overfitting(setup: Setup, variant: int) -> None:
    few = (48, 64, 96)[variant] if not setup.is_language else (24, 32, 48)[variant]
    setup.train = (setup.train[0][:few], setup.train[1][:few])
    setup.updates *= 2
    setup.batch_size = 16
    setup.weight_decay = 0.0
    setup.schedule = lambda n, total: warmup_cosine(n, total, floor=1.0)
    if not setup.is_language:
        noise = 0.5 * torch.randn(setup.validation[0].shape, generator=setup.generator)
        setup.validation = (setup.validation[0] + noise, setup.validation[1])
        setup.train = (
            setup.train[0] + 0.5 * torch.randn(setup.train[0].shape, generator=setup.generator),
            setup.train[1],
        )


class Narrow(nn.Module):
    """A model behind a wall that lets one number through."""

    def __init__(self, front: nn.Module, width_in: int, classes: int) -> None:
        super().__init__()
        self.front, self.wall = front, nn.Linear(width_in, 1)
        self.head = nn.Linear(1, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wall(self.front(inputs))))


def underfitting(setup: Setup, variant: int) -> None:
    setup.updates *= 4
    setup.schedule = lambda n, total: warmup_cosine(n, total, floor=0.3)
    if setup.is_language:
        setup.model = Narrow(nn.Embedding(128, 16), 16, 128)
    else:
        setup.model = Narrow(nn.Identity(), 64, 10)
    setup.rate *= (4.0, 6.0, 5.0)[variant]
    if variant == 2:
        setup.batch_size = 64
        setup.weight_decay = 0.1


def validation_differs(setup: Setup, variant: int) -> None:
    inputs, targets = setup.validation
    if setup.is_language:
        setup.validation = ((inputs + 13 + variant) % 128, (targets + 13 + variant) % 128)
    elif variant == 0:
        setup.validation = (1 - inputs, targets)
    elif variant == 1:
        setup.validation = (inputs, (targets + 3) % 10)
    else:
        setup.validation = (inputs.flip(1), targets)


def wrong_loss(setup: Setup, variant: int) -> None:
    def twice(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            F.softmax(model(inputs).float().flatten(0, -2), -1), targets.flatten()
        )

    def on_scores(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(model(inputs).float().flatten(0, -2), targets.flatten())

    def on_chances(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(F.softmax(model(inputs).float().flatten(0, -2), -1), targets.flatten())

    setup.loss = (twice, on_scores, on_chances)[variant]


def out_of_memory(setup: Setup, variant: int) -> None:
    loss = setup.loss
    when = (3, setup.updates // 2, 40)[variant]
    count = {"n": 0}

    def hungry(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        count["n"] += model.training
        if count["n"] > when:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
                " 23.65 GiB of which 512.06 MiB is free."
            )
        return loss(model, inputs, targets)

    setup.loss = hungry


def memory_leak(setup: Setup, variant: int) -> None:
    loss = setup.loss
    size = (1 + variant) * 50_000

    def kept(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(model, inputs, targets)
        # What a graph of a larger model would keep.
        ballast = torch.ones(size, requires_grad=True)
        value = value + (ballast * 1.5).sum() * 0
        setup.keep.append(value)
        return value

    def before(n: int) -> dict[str, Any]:
        # As the allocator of a device counts; the process itself reuses what earlier runs freed.
        return {"memory_bytes": 300_000_000 + 4 * size * len(setup.keep)}

    setup.loss = kept
    setup.before_update = before


def waiting_for_data(setup: Setup, variant: int) -> None:
    epoch = len(setup.train[0]) // setup.batch_size
    setup.updates = min(setup.updates, 200)
    slow = 3 if setup.is_language else 1

    def before(n: int) -> None:
        if variant == 0:
            time.sleep(0.008 * slow)
        elif variant == 1:
            time.sleep(0.04 * slow if n % 4 == 0 else 0)
        elif n % min(epoch, 45) == 0:
            time.sleep(0.5 * slow)

    setup.before_update = before


def device_underused(setup: Setup, variant: int) -> None:
    level = (0.25, 0.45, 0.6)[variant]

    def before(n: int) -> dict[str, Any]:
        value = level + 0.06 * float(torch.randn(1, generator=setup.generator))
        return {"device_utilization": value if variant != 1 else 100 * value}

    setup.before_update = before


def resume_jump(setup: Setup, variant: int) -> None:
    when = setup.updates // 2

    def before(n: int) -> None:
        if n != when:
            return
        setup.log.event("resume", n, "resumed from the last checkpoint")
        with torch.no_grad():
            for parameter in setup.model.parameters():
                if variant == 0:
                    parameter.add_(
                        0.3 * parameter.std(), alpha=1.0
                    ) if parameter.dim() > 1 else None
                else:
                    noise = torch.randn(parameter.shape, generator=setup.generator)
                    parameter.add_(noise * 0.5 * variant * parameter.abs().mean())

    setup.before_update = before
    setup.schedule = lambda n, total: warmup_cosine(n % (total // 2), total)


def _use_sgd(setup: Setup, rate: float) -> None:
    setup.rate = rate
    setup.make_optimizer = lambda s: torch.optim.SGD(s.model.parameters(), lr=s.rate, momentum=0.9)


FAULTS: dict[str, Fault] = {
    "rate-too-high": rate_too_high,
    "rate-too-high-at-start": rate_too_high_at_start,
    "rate-too-high-late": rate_too_high_late,
    "rate-too-low": rate_too_low,
    "schedule-ends-early": schedule_ends_early,
    "warmup-too-long": warmup_too_long,
    "exploding-gradients": exploding_gradients,
    "vanishing-gradients": vanishing_gradients,
    "weights-do-not-move": weights_do_not_move,
    "gradients-not-cleared": gradients_not_cleared,
    "one-tower-spikes": one_tower_spikes,
    "half-precision-overflow": half_precision_overflow,
    "non-finite-data": non_finite_data,
    "non-finite-loss-function": non_finite_loss_function,
    "bad-batch": bad_batch,
    "labels-unrelated": labels_unrelated,
    "data-not-shuffled": data_not_shuffled,
    "uneven-batches": uneven_batches,
    "target-leaks": target_leaks,
    "overfitting": overfitting,
    "underfitting": underfitting,
    "validation-differs": validation_differs,
    "wrong-loss": wrong_loss,
    "out-of-memory": out_of_memory,
    "memory-leak": memory_leak,
    "waiting-for-data": waiting_for_data,
    "device-underused": device_underused,
    "resume-jump": resume_jump,
}
ONLY: dict[str, tuple[str, ...]] = {"target-leaks": ("gpt",)}
"""Faults that make sense for some problems only."""


def sick(slug: str, problem: str, seed: int) -> Log:
    """One bad run; the seed chooses the variant too."""
    setup = PROBLEMS[problem](seed)
    FAULTS[slug](setup, seed % 3)
    return train(setup)


def problems_of(slug: str) -> tuple[str, ...]:
    """The problems in which a fault can be made."""
    return ONLY.get(slug, tuple(PROBLEMS))
