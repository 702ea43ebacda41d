"""What a run promises, checked before it begins and written down as `contract.yaml`.

The values of the baseline are written into the contract: the verdict needs no other folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.assembly.deciding import deciding_fields, deciding_metric
from surefoot.config.sections import Settings
from surefoot.config.sections.contract import ContractOnSection
from surefoot.core.errors import RequestError
from surefoot.observe.readers.run_data import read_run
from surefoot.tasks.task import Task


def check_contract(settings: Settings, measure: Callable[[], Mapping[str, float]]) -> None:
    """Refuses a contract that could not be judged.

    Args:
        measure: gives a value of each metric that the run will have, as SET/METRIC.

    Raises:
        RequestError: it names a metric that is not there, or a baseline that cannot be read.
    """
    contract = settings.contract
    if not isinstance(contract, ContractOnSection):
        return
    measured = measure()
    named = [("contract.slices", slice_.metric) for slice_ in contract.slices]
    if contract.metric != "as-task":
        named.append(("contract.metric", contract.metric))
    for where, metric in named:
        if metric not in measured and not any(m.endswith(f"/{metric}") for m in measured):
            raise RequestError(
                f"the contract names the metric {metric}, which this run does not measure",
                where=where,
                rule=f"it measures {', '.join(sorted(measured)) or 'nothing: no validation set'}",
                remedy="name one of these",
            )
    baseline_values(contract)


def baseline_values(contract: ContractOnSection) -> dict[str, float]:
    """The metrics of the baseline as its own run ended; empty where there is none.

    Raises:
        RequestError: it cannot be read, or lacks a metric that a slice names.
    """
    if contract.baseline == "none":
        return {}
    values = {
        name: value for name, (_, value) in read_run(contract.baseline).judged("last").items()
    }
    for slice_ in contract.slices:
        if not math.isfinite(values.get(slice_.metric, math.nan)):
            raise RequestError(
                f"the baseline has no value of {slice_.metric}",
                where=f"contract.baseline: {contract.baseline}",
                rule=f"it has {', '.join(sorted(values)) or 'no evaluation'}",
                remedy="name another run, or evaluate the baseline on that set too",
            )
    return values


def promise(settings: Settings, task: Task, before: Mapping[str, Any]) -> dict[str, object]:
    """The content of `contract.yaml`.

    Args:
        before: the contract of the run that is resumed; empty for a new run. The values of the same
            baseline are kept from it.
    """
    promised: dict[str, object] = {
        "horizon": str(settings.train.horizon),
        "non_finite": settings.guard.non_finite,
        "deterministic_kernels": settings.deterministic,
        "resume": "exact: same weights, same samples, each update once",
    }
    contract = settings.contract
    if not isinstance(contract, ContractOnSection):
        return promised
    held = before.get("baseline")
    if contract.baseline == "none":
        baseline: object = "none"
    elif isinstance(held, Mapping) and held.get("run") == contract.baseline:
        baseline = dict(held)
    else:
        baseline = {"run": contract.baseline, "values": baseline_values(contract)}
    plain = contract.model_dump(mode="json")
    plain |= {"metric": deciding_fields(deciding_metric(settings, task)), "baseline": baseline}
    del plain["direction"]
    return {**plain, **{key: value for key, value in promised.items() if key != "resume"}}
