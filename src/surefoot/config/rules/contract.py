"""Rules of contracts: a contract that cannot be judged is refused before the run."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.config.rules.rule import Rule, broken
from surefoot.config.sections.contract import ContractOnSection, ContractSection
from surefoot.config.sections.data import DataSection
from surefoot.config.sections.models import ModelSection
from surefoot.config.sections.run import EvaluateSection
from surefoot.core.errors import Violation


def named_metric_needs_a_direction(contract: ContractSection) -> Iterator[Violation]:
    """Only the task knows which direction is better, and only for its own metric."""
    if not isinstance(contract, ContractOnSection) or contract.metric == "as-task":
        return
    if contract.direction == "as-task":
        yield broken(
            "contract.direction",
            f"contract.metric is {contract.metric}, and its direction is not given",
            "use contract.direction=min or max",
        )


def slices_need_a_baseline(contract: ContractSection) -> Iterator[Violation]:
    """A regression is a change relative to a baseline."""
    if not isinstance(contract, ContractOnSection) or not contract.slices:
        return
    if contract.baseline == "none":
        yield broken(
            "contract.slices",
            "slices are measured against a baseline, and contract.baseline is none",
            "name the folder of a run, contract.baseline=RUN",
        )
    for index, slice_ in enumerate(contract.slices):
        if not all(slice_.metric.partition("/")):
            yield broken(
                f"contract.slices.{index}.metric",
                f"{slice_.metric!r} is not SET/METRIC",
                "write for example validation/accuracy",
            )


def cost_needs_a_price(contract: ContractSection) -> Iterator[Violation]:
    """A cost is device-hours times a price."""
    if not isinstance(contract, ContractOnSection):
        return
    budget = contract.budget
    if budget.cost != "none" and budget.price_per_device_hour == "none":
        yield broken(
            "contract.budget.cost",
            "a cost needs contract.budget.price_per_device_hour",
            "set the price of one device per hour, or limit device_hours",
        )


def kind_of_result_demands(contract: ContractSection) -> Iterator[Violation]:
    """What the kind of result requires that the recipe can provide."""
    if contract.kind not in ("production_candidate", "adapter"):
        return
    assert isinstance(contract, ContractOnSection)
    if not contract.slices:
        yield broken(
            "contract.slices",
            f"a result of kind {contract.kind} is measured against a baseline, slice by slice",
            "name at least one slice, and contract.baseline",
        )
    if contract.kind == "production_candidate" and contract.target == "none":
        yield broken("contract.target", "a production candidate has a target", "give a number")


def adapter_has_base_weights(contract: ContractSection, model: ModelSection) -> Iterator[Violation]:
    """An adapter changes an existing model."""
    if contract.kind == "adapter" and model.initial_weights == "none":
        yield broken(
            "model.initial_weights",
            "contract.kind is adapter, and there are no weights to adapt",
            "name the weights, or use another kind",
        )


def contract_needs_evaluations(
    contract: ContractSection, evaluate: EvaluateSection, data: DataSection
) -> Iterator[Violation]:
    """A target and slices are judged by evaluations."""
    if not isinstance(contract, ContractOnSection):
        return
    judged = contract.target != "none" or contract.slices
    if judged and evaluate.every == "never":
        yield broken(
            "contract.target",
            "is judged by evaluations, and evaluate.every is never",
            "use evaluate.every=end",
        )
    held_out = data.validation_fraction or any(
        getattr(data, name, "none") != "none" for name in ("validation_path", "validation_target")
    )
    if judged and not held_out:
        yield broken(
            "contract.target",
            "is judged on a validation set, and data.validation_fraction is 0",
            "hold out a share of the data, such as data.validation_fraction=0.1",
        )


RULES: tuple[Rule, ...] = (
    named_metric_needs_a_direction,
    slices_need_a_baseline,
    cost_needs_a_price,
    kind_of_result_demands,
    adapter_has_base_weights,
    contract_needs_evaluations,
)
