"""The terms of routers beside a task's loss: against a naive loop, and over the life of a run."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.small_runs import (
    Recorder,
    UnevenTexts,
    assembled,
    settings_of,
    small_gpt,
    train,
    train_on,
)
from surefoot.assembly.task_layout import weight_of, with_routers
from surefoot.core.reports import StepReport
from surefoot.data.order import Cursor
from surefoot.models.moe import RoutedFeedForward, heard, routed_layers
from surefoot.numerics.modes import untouched_statistics
from surefoot.run.run_facts import exactness
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.routed import RouterTask, count_tokens
from surefoot.tasks.task import FunctionTask, main_weight, split_dependence
from surefoot.train_step import TrainStep

EXPERTS: dict[str, Any] = {"num_experts": 4, "balance_weight": 0.3, "z_weight": 0.2}
BIASED: dict[str, Any] = {"num_experts": 4, "balance": "bias", "scores": "sigmoid"}
DOUBLE = torch.float64


def with_inputs(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores, and what each routed layer was given."""
    inputs: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, n=name: inputs.update({n: args[0]}))
        for name, layer in routed_layers(model).items()
    ]
    logits = model(ids)
    for handle in handles:
        handle.remove()
    return logits, inputs


def naive_loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Cross-entropy over all counted tokens; balance and z as means over all tokens."""
    ce, balance, z = (torch.zeros((), dtype=DOUBLE) for _ in range(3))
    counted, seen = 0, 0
    for batch in batches:
        logits, inputs = with_inputs(model, batch["input_ids"])
        labels = batch["labels"][:, 1:].reshape(-1)
        ce = ce + F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        counted += int((labels != -100).sum())
        num_tokens = batch["input_ids"].numel()
        seen += num_tokens
        for name, layer in routed_layers(model).items():
            scores = inputs[name].reshape(-1, 16) @ layer.router.weight.T
            chosen = scores.topk(2).indices
            f = torch.stack([(chosen == i).sum() for i in range(4)]).double() / (2 * num_tokens)
            p = scores.softmax(-1).mean(0)
            balance = balance + num_tokens * 4 * (f * p).sum()
            z = z + (scores.exp().sum(-1).log() ** 2).sum()
    return {"loss": ce / counted, "balance": 0.3 * balance / seen, "router_z": 0.2 * z / seen}


def batches_of(*sizes: int) -> list[dict[str, Tensor]]:
    data, index, batches = UnevenTexts(), 0, []
    for size in sizes:
        rows = [data[index + i] for i in range(size)]
        batches.append({key: torch.stack([row[key] for row in rows]) for key in rows[0]})
        index += size
    return batches


def step_of(model: nn.Module, recorder: Recorder, **sections: Any) -> TrainStep:
    settings = settings_of(**sections)
    settings["train"] = {"horizon": "20 steps", "clip_norm": "off"}
    task = GenerationTask(24)
    return TrainStep(model, task, settings=settings, observers=(recorder,))


def test_losses_and_gradients_are_those_of_a_naive_loop() -> None:
    torch.manual_seed(0)
    model = small_gpt(experts=EXPERTS).double()
    batches = batches_of(4, 3, 1)
    expected = naive_loss(model, batches)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(sum(expected.values()), list(parameters.values()))
    recorder = Recorder()
    step = step_of(model, recorder)
    step(*batches)
    step.settle()
    (report,) = recorder.reports
    assert report.loss == pytest.approx(expected["loss"].item(), rel=1e-12)
    for term in ("balance", "router_z"):
        assert report.terms[term] == pytest.approx(expected[term].item(), rel=1e-12)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14, msg=name)
    labels = torch.cat([batch["labels"] for batch in batches])[:, 1:]
    assert report.weight == report.tokens == int((labels != -100).sum())


def first_report(*sizes: int, **experts: Any) -> StepReport:
    torch.manual_seed(0)
    recorder = Recorder()
    step = step_of(small_gpt(experts=EXPERTS | experts).double(), recorder)
    step(*batches_of(*sizes))
    step.settle()
    return recorder.reports[0]


def test_only_the_balance_depends_on_the_split() -> None:
    whole, cut = first_report(6), first_report(1, 2, 3)
    assert whole.loss == pytest.approx(cut.loss, rel=1e-12)
    assert whole.terms["router_z"] == pytest.approx(cut.terms["router_z"], rel=1e-12)
    assert abs(whole.terms["balance"] / cut.terms["balance"] - 1) > 1e-4


def test_a_term_of_weight_zero_is_not_there() -> None:
    assert first_report(2, balance="none", z_weight=0.0).terms == {}
    assert set(first_report(2, balance="bias").terms) == {"router_z"}


def test_biases_follow_the_load_of_each_window() -> None:
    torch.manual_seed(0)
    model = small_gpt(experts=BIASED | {"bias_rate": 0.01}).double()
    recorder = Recorder()
    step = step_of(model, recorder)
    expected = torch.zeros(2, 4, dtype=DOUBLE)
    for _ in range(3):
        counts = torch.zeros(2, 4, dtype=DOUBLE)
        for batch in batches_of(4, 2):
            with torch.no_grad(), heard(list(routed_layers(model).values())) as routings:
                model(batch["input_ids"])
            counts += torch.stack([routing.counts for routing in routings])
        step(*batches_of(4, 2))
        expected += 0.01 * torch.sign(counts.mean(1, keepdim=True) - counts)
        found = [layer.expert_bias for layer in routed_layers(model).values()]
        torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-15)
    assert expected.abs().sum() > 0


def test_biases_stay_where_an_update_is_left_out() -> None:
    torch.manual_seed(0)
    model = small_gpt(experts=BIASED).double()
    step = step_of(model, Recorder(), guard={"non_finite": "skip"})
    step(*batches_of(2))
    kept = [layer.expert_bias.clone() for layer in routed_layers(model).values()]
    with torch.no_grad():
        # The cross-entropy of a head that is not finite says nothing of the routing.
        head = model.head.weight.clone()
        model.head.weight.fill_(float("nan"))
    step(*batches_of(3))
    step.settle()
    assert all(
        torch.equal(layer.expert_bias, bias)
        for layer, bias in zip(routed_layers(model).values(), kept, strict=True)
    )
    with torch.no_grad():
        model.head.weight.copy_(head)
    step(*batches_of(3))
    assert any(
        not torch.equal(layer.expert_bias, bias)
        for layer, bias in zip(routed_layers(model).values(), kept, strict=True)
    )


def test_biases_survive_in_checkpoints(tmp_path: Path) -> None:
    settings = settings_of()
    whole = train_on(settings, str(tmp_path / "whole"), 6, resume=False, experts=BIASED)
    train_on(settings, str(tmp_path / "cut"), 3, resume=False, experts=BIASED)
    resumed = train_on(settings, str(tmp_path / "cut"), 6, resume=True, experts=BIASED)
    assert resumed.losses == whole.losses[3:]
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    bias = whole.weights["blocks.1.feedforward.expert_bias"]
    assert bias.abs().max() > 0


def test_recompute_counts_nothing_twice() -> None:
    found = [
        train("gpt", settings_of(memory={"recompute": extent}), 3, experts=BIASED)
        for extent in ("none", "blocks")
    ]
    assert found[0].losses == found[1].losses
    for name, weight in found[0].weights.items():
        assert torch.equal(found[1].weights[name], weight), name


def test_loads_are_among_the_sampled_numbers() -> None:
    experts = {"num_experts": 4, "capacity_factor": 1.0}
    assembly = assembled("gpt", settings_of(log={"details_every": "2 steps"}), experts=experts)
    recorder = Recorder()
    update = assembly.make_update((recorder,))
    layers = list(routed_layers(assembly.material.model).values())
    with closing(assembly.open_windows(Cursor())) as windows:
        window = next(windows)
        counts, dropped = torch.zeros(2, 4), 0
        for micro_batch in window.micro_batches:
            with torch.no_grad(), heard(layers) as routings:
                assembly.material.model(micro_batch.data["input_ids"])
            counts += torch.stack([routing.counts for routing in routings])
            dropped += int(sum(routing.num_dropped for routing in routings))
        update(window)
        update(next(windows))
        update.parts.log.settle()
    (report,) = [r for r in recorder.reports if r.details]
    load = counts / counts.mean(1, keepdim=True)
    assert report.window == 1
    assert report.details["expert_load_max"] == pytest.approx(load.max().item())
    assert report.details["expert_load_min"] == pytest.approx(load.min().item())
    assert report.details["dropped_tokens"] == dropped / counts.sum().item() > 0
    (evaluation,) = assembly.evaluator.run(2)
    assert 0 < evaluation.metrics["dropped_tokens"] < 1
    assembly.close()


def test_what_is_run_outside_an_update_is_not_counted() -> None:
    model = small_gpt(experts=BIASED)
    task = with_routers(GenerationTask(24), model, lambda tensor: tensor)
    assert isinstance(task, RouterTask)
    task.loss_sum(model, batches_of(2)[0])
    assert task.routers.loads.measures() == {}
    with task.routers.loads.counting():
        task.loss_sum(model, batches_of(2)[0])
    once = task.routers.loads.measures()
    task.loss_sum(model, batches_of(3)[0])
    assert task.routers.loads.measures() == once


def test_a_filler_meets_the_others_and_counts_for_nothing() -> None:
    model = small_gpt(experts=EXPERTS)
    shared: list[Tensor] = []

    def sum_over_ranks(counts: Tensor) -> Tensor:
        shared.append(counts.clone())
        return counts

    task = with_routers(GenerationTask(24), model, sum_over_ranks)
    assert isinstance(task, RouterTask)
    own, filler = batches_of(2, 1)
    with task.routers.loads.counting():
        task.loss_sum(model, own)
        once = task.routers.loads.measures()
        with untouched_statistics(model):
            task.loss_sum(model, filler)
    assert shared[-1].shape == shared[0].shape and not shared[-1].any()
    assert task.routers.loads.measures() == once


def test_the_record_names_what_depends_on_the_split() -> None:
    capacity = {"num_experts": 4, "capacity_factor": 1.5}
    for experts, told in (
        (EXPERTS, ["loss: term balance, the load is"]),
        (BIASED, []),
        (
            capacity,
            [
                "blocks.0.feedforward: RoutedFeedForward, each micro-batch drops",
                "blocks.1.feedforward: RoutedFeedForward, each micro-batch drops",
                "loss: term balance, the load is",
            ],
        ),
    ):
        assembly = assembled("gpt", settings_of(), experts=experts)
        entries: Any = exactness(assembly)["depends_on_the_split"]
        found = [entry for entry in entries if "attention" not in entry]
        assert len(found) == len(told)
        assert all(entry.startswith(start) for entry, start in zip(found, told, strict=True))
        assembly.close()


def test_a_task_of_the_user_s_own_can_declare_a_term() -> None:
    declared = {"spread": "a product of means over the micro-batch"}
    task = FunctionTask(lambda model, batch: torch.zeros(()), depends_on_split=declared)
    assert split_dependence(task) == declared
    assert split_dependence(GenerationTask(4)) == {}


def test_weights_of_workers_hold_no_model() -> None:
    model = small_gpt(experts=EXPERTS)
    own = GenerationTask(24)
    weight = weight_of(own, with_routers(own, model, lambda tensor: tensor))
    assert len(pickle.dumps(weight)) < 2000
    (batch,) = batches_of(3)
    found = weight(batch)
    assert found == {"loss": own.weight(batch), "balance": 30.0, "router_z": 30.0}
    assert main_weight(found) == own.weight(batch)
    assert weight_of(own, own)(batch) == own.weight(batch)


def test_tokens_of_a_batch() -> None:
    ids = torch.zeros(3, 4, dtype=torch.int64)
    assert count_tokens({"input_ids": ids}) == count_tokens((ids, ids)) == count_tokens(ids) == 12.0
    assert count_tokens((torch.zeros(3, 4), torch.zeros(3))) == 3.0


def test_a_dense_model_keeps_its_task() -> None:
    task = GenerationTask(24)
    assert with_routers(task, small_gpt(), lambda tensor: tensor) is task


def test_all_experts_learn() -> None:
    torch.manual_seed(0)
    model = small_gpt(experts=EXPERTS)
    step = step_of(model, Recorder())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        step(*batches_of(8))
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert isinstance(model.blocks[0].feedforward, RoutedFeedForward)
