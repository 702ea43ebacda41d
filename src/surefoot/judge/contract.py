"""Judges one run by the contract that it recorded before it began.

Reads only the run folder: the contract contains the baseline's values. What has not been shown
never counts as held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from surefoot.core.budget import Budget
from surefoot.core.errors import SurefootError
from surefoot.core.units import Seconds, parse_count
from surefoot.judge.evidence import evidence_of
from surefoot.judge.verdict import Clause, ContractVerdict, Standing
from surefoot.observe.events import EventKind
from surefoot.observe.readers.run_data import RunData
from surefoot.observe.readers.runs import RunStatus
from surefoot.state.checkpoint import list_checkpoints
from surefoot.state.manifest import read_manifest

TIERS = ("T0", "T1", "T2", "T3")


def verdict_on(run: RunData) -> ContractVerdict | None:
    """The verdict on a run; None if it has no contract."""
    contract = run.contract
    if "kind" not in contract:
        return None
    try:
        clauses = (
            _ended(run),
            *_target(run, contract),
            *_slices(run, contract),
            *_budget(run, contract),
            _resume(run, contract),
            *evidence_of(run, str(contract["kind"])),
        )
    except (KeyError, TypeError, ValueError, SurefootError) as error:
        broken = Clause("contract", Standing.BROKEN, "a readable contract", repr(error))
        return ContractVerdict((broken,))
    return ContractVerdict(clauses)


def _ended(run: RunData) -> Clause:
    summary = run.summary
    at = "" if summary.step is None else f" at update {summary.step:,}"
    found = f"{summary.status.value}{at}"
    standing, remedy = Standing.NOT_SHOWN, "resume it with surefoot train --resume"
    if summary.status is RunStatus.FINISHED:
        standing, remedy = Standing.HELD, ""
    elif summary.status is RunStatus.FAILED:
        standing, found = Standing.BROKEN, f"{found}: {summary.note}"
    elif summary.status is RunStatus.RUNNING:
        remedy = "it is still running"
    return Clause("end", standing, "the run reaches its end", found, remedy)


def _is_final(run: RunData) -> bool:
    return run.summary.status is RunStatus.FINISHED


def _not_final(run: RunData) -> str:
    return f"the run is {run.summary.status.value}: a later evaluation may say otherwise"


def _target(run: RunData, contract: Mapping[str, Any]) -> Iterator[Clause]:
    target = contract["target"]
    if target == "none":
        return
    name, direction = run.deciding_name(), run.deciding[2]
    promised = f"{name or 'the deciding metric'} {'<=' if direction == 'min' else '>='} {target:g}"
    judged = run.judged(str(contract["judged"]))
    if name not in judged:
        yield _unmeasured("target", promised, contract)
        return
    step, value = judged[name]
    reached = value <= target if direction == "min" else value >= target
    yield _measured(run, "target", reached and math.isfinite(value), promised, f"{value:.6g}", step)


def _slices(run: RunData, contract: Mapping[str, Any]) -> Iterator[Clause]:
    judged = run.judged(str(contract["judged"]))
    for slice_ in contract["slices"]:
        metric, direction = str(slice_["metric"]), slice_["direction"]
        before = float(contract["baseline"]["values"][metric])
        allowed = float(slice_["allowed_regression"])
        limit = before + allowed if direction == "min" else before - allowed
        sign = "<=" if direction == "min" else ">="
        promised = f"{sign} {limit:.6g} (baseline {before:.6g}, allowed {allowed:g})"
        clause = f"slices.{metric}"
        if metric not in judged:
            yield _unmeasured(clause, promised, contract)
            continue
        step, value = judged[metric]
        kept = value <= limit if direction == "min" else value >= limit
        change = f"{value:.6g}, {value - before:+.4g} from the baseline"
        yield _measured(run, clause, kept and math.isfinite(value), promised, change, step)


def _unmeasured(name: str, promised: str, contract: Mapping[str, Any]) -> Clause:
    if contract["judged"] == "best":
        remedy = "no kept checkpoint was evaluated at its step: evaluate as often as you save"
    else:
        remedy = "evaluate this set"
    return Clause(name, Standing.NOT_SHOWN, promised, "never evaluated", remedy)


def _measured(
    run: RunData, name: str, is_kept: bool, promised: str, found: str, step: int
) -> Clause:
    """A clause about a number; final if the run is."""
    found = f"{found} at update {step:,}"
    if not _is_final(run):
        return Clause(name, Standing.NOT_SHOWN, promised, found, _not_final(run))
    if is_kept:
        return Clause(name, Standing.HELD, promised, found)
    return Clause(name, Standing.BROKEN, promised, found, "surefoot compare shows what differs")


def budget_in(contract: Mapping[str, Any]) -> Budget:
    """The limits in a contract."""
    section = contract["budget"]
    wall = section["wall_clock"]
    seconds = inf
    if wall != "none":
        count = parse_count(str(wall))
        assert isinstance(count, Seconds)
        seconds = float(count.value)

    def limit(name: str, none: float = inf) -> float:
        return none if section[name] == "none" else float(section[name])

    return Budget(
        limit("device_hours"), seconds, limit("cost"), limit("price_per_device_hour", 0.0)
    )


def _budget(run: RunData, contract: Mapping[str, Any]) -> Iterator[Clause]:
    device_seconds = sum(stretch.device_seconds for stretch in run.stretches)
    was_cut = _cut_by_budget(run)
    for spent in budget_in(contract).spent(run.seconds, device_seconds):
        promised = f"at most {spent.limit:.4g} {spent.unit}"
        found = str(spent)
        name = f"budget.{spent.name}"
        if spent.is_gone or spent.name in was_cut:
            done = _is_final(run)
            horizon = run.extra.get("horizon_updates")
            of = f" of {horizon:,}" if isinstance(horizon, int) else ""
            step = run.summary.step or 0
            where = "" if done else f"; it ended the run at update {step:,}{of}"
            yield Clause(
                name,
                Standing.BROKEN,
                promised,
                found + where,
                "" if done else f"accept a larger one: --accept-change contract.{name}",
            )
        elif _is_final(run):
            yield Clause(name, Standing.HELD, promised, found)
        else:
            yield Clause(name, Standing.NOT_SHOWN, promised, f"{found} so far", _not_final(run))


def _cut_by_budget(run: RunData) -> set[str]:
    """The limit that ended the last attempt, if any."""
    if run.summary.status is not RunStatus.STOPPED:
        return set()
    for event in reversed(run.events):
        if event.kind == EventKind.BUDGET:
            named = event.data.get("limit")
            return {str(named)}
        if event.kind in (EventKind.START, EventKind.RESUME):
            break
    return set()


def _resume(run: RunData, contract: Mapping[str, Any]) -> Clause:
    rule = str(contract["resume"])
    promised = f"every resume keeps at least {rule}, and a complete checkpoint exists"
    resumes = [event for event in run.events if event.kind == EventKind.RESUME]
    tiers = [str(event.data.get("tier", "")) for event in resumes]
    worse = [tier for tier in tiers if tier not in TIERS or TIERS.index(tier) > TIERS.index(rule)]
    if worse:
        found = f"a resume kept {worse[0] or 'an unknown part'} only"
        return Clause("resume", Standing.BROKEN, promised, found, "resume on the same topology")
    said = f"{len(resumes)} resumes ({', '.join(tiers)})" if resumes else "no resume"
    folder = run.path / "checkpoints"
    checkpoints = list_checkpoints(folder) if folder.is_dir() else []
    if not checkpoints:
        found = f"{said}; no checkpoint yet"
        return Clause("resume", Standing.NOT_SHOWN, promised, found, "let the run save once")
    newest = checkpoints[-1]
    try:
        files = read_manifest(newest).files
        torn = [
            name
            for name, entry in files.items()
            if not (newest / name).is_file() or (newest / name).stat().st_size != entry.size_bytes
        ]
    except SurefootError as error:
        torn = [error.what]
    if torn:
        found = f"{said}; {newest.name} is damaged: {torn[0]}"
        return Clause("resume", Standing.BROKEN, promised, found, "surefoot checkpoint verify")
    return Clause("resume", Standing.HELD, promised, f"{said}; {newest.name} is complete")
