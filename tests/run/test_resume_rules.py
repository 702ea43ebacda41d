"""What may change on a resume: safe, by name, or never; and no resume rewrites what is done."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.small_runs import assembled, settings_of
from surefoot.assembly.material import Prepared
from surefoot.config.building import make_schedule
from surefoot.config.fields import Section
from surefoot.config.load import load_recipe, recipe_names, resolve_settings
from surefoot.core.counting import Pace
from surefoot.core.errors import EXIT_REQUEST, CheckpointError, RequestError, RunFolderError
from surefoot.core.reports import Event
from surefoot.observe.events import read_events
from surefoot.observe.metrics_log import read_rows
from surefoot.run.folder_run import RunResult
from surefoot.run.resume_rules import (
    ACCEPT_FIELDS,
    IMPOSSIBLE_FIELDS,
    SAFE_FIELDS,
    ChangeClass,
    Resumption,
    Tier,
    classify,
    refuse_crash_loop,
    resume_tier,
)
from surefoot.run.run_facts import describe
from surefoot.state.manifest import Manifest
from surefoot.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "train": {"horizon": "6 steps", "micro_batch": 4},
    "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.0},
    "schedule": {"kind": "wsd", "warmup": 2},
    "evaluate": {"every": "never"},
    "log": {"console": "off"},
}


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def train(
    runs: Path,
    resume: Path | None = None,
    accept: tuple[str, ...] = (),
    shift: float = 0.0,
    **changes: dict[str, Any],
) -> RunResult:
    torch.manual_seed(0)
    settings = {**SETTINGS}
    for name, section in changes.items():
        settings[name] = section if "kind" in section else {**settings.get(name, {}), **section}
    inputs = torch.arange(24.0).reshape(12, 2) / 24 + shift
    trainer = Trainer(
        nn.Linear(2, 1),
        (inputs, inputs.sum(1, keepdim=True)),
        squared_error,
        settings=settings,
        runs=runs,
    )
    return trainer.fit(resume=resume, accept=accept)


@pytest.fixture
def done(tmp_path: Path) -> Path:
    folder = train(tmp_path).folder
    assert folder is not None
    return folder


def rates(run: Path) -> list[float]:
    return [row["lr"]["decay"] for row in read_rows(run / "metrics.jsonl")]  # type: ignore[index]


def test_a_cooldown_is_decided_when_a_stable_run_is_resumed(done: Path, tmp_path: Path) -> None:
    before = rates(done)
    result = train(
        tmp_path,
        done,
        train={"horizon": "10 steps"},
        schedule={"cooldown": 4},
    )
    assert result.step == 10
    assert rates(done)[:6] == before == [0.05, *[0.1] * 5]
    assert rates(done)[6:] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    (resumed,) = [e for e in read_events(done / "events.jsonl") if e.kind == "resume"]
    assert "schedule.cooldown: 'undecided' -> '4 steps'" in resumed.data["changes"]  # type: ignore[operator]


def test_a_warm_up_that_is_a_share_stays_what_it_was(tmp_path: Path) -> None:
    share = {"kind": "wsd", "warmup": 0.34}
    run = train(tmp_path, schedule=share).folder
    assert run is not None
    train(tmp_path, run, schedule=share, train={"horizon": "12 steps"})
    train(tmp_path, run, schedule={**share, "cooldown": 4}, train={"horizon": "16 steps"})
    assert rates(run)[:13] == [0.05, *[0.1] * 12]
    assert rates(run)[13:] == pytest.approx([0.075, 0.05, 0.025])


def test_a_cooldown_that_began_in_the_past_is_refused(done: Path, tmp_path: Path) -> None:
    rows = rates(done)
    with pytest.raises(RequestError, match="another learning rate"):
        train(tmp_path, done, train={"horizon": "8 steps"}, schedule={"cooldown": 5})
    assert rates(done) == rows, "a refused resume leaves the run as it was"


@pytest.mark.parametrize("name", ["schedule.cooldown", "schedule", "train.horizon", "train"])
def test_another_past_may_be_accepted_by_any_name_that_covers_it(
    done: Path, tmp_path: Path, name: str
) -> None:
    change: dict[str, Any] = {"train": {"horizon": "8 steps"}, "schedule": {"cooldown": 5}}
    assert train(tmp_path, done, (name,), **change).step == 8


@pytest.mark.parametrize("recorded", [{}, {"train": "1", "old": "2"}, {"train": "0"}])
def test_a_data_set_that_is_new_gone_or_other_needs_a_word(recorded: dict[str, str]) -> None:
    settings = resolve_settings(SETTINGS).config
    pace = Pace(samples_per_update=4)
    about = {"data": recorded, "samples_per_update": pace.samples_per_update}
    manifest = Manifest(3, "resumable", {}, {}, about)
    schedule = make_schedule(settings, pace)
    with pytest.raises(CheckpointError, match="has changed since"):
        Resumption(settings).check(manifest, {"train": "1"}, schedule, pace)
    accepted = Resumption(settings, accepted=("data",))
    accepted.check(manifest, {"train": "1"}, schedule, pace)


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("log", {"weight_norm_every": "1 steps"}),
        ("loader", {"prefetch": 3}),
        ("checkpoint", {"keep": 1}),
        ("guard", {"skip_budget": 3}),
    ],
)
def test_safe_changes_need_no_word(
    section: str, change: dict[str, Any], done: Path, tmp_path: Path
) -> None:
    assert train(tmp_path, done, **{section: change}).step == 6


def test_a_change_that_matters_needs_its_name(done: Path, tmp_path: Path) -> None:
    change: dict[str, Any] = {"optimizer": {"lr": 0.2}, "train": {"horizon": "7 steps"}}
    with pytest.raises(RequestError) as caught:
        train(tmp_path, done, **change)
    assert "optimizer.lr: 0.1 -> 0.2" in caught.value.what and "--accept-change" in str(
        caught.value
    )
    assert "horizon" not in caught.value.what
    assert train(tmp_path, done, ("optimizer.lr",), **change).step == 7
    assert rates(done)[-1] == 0.2


def test_what_the_saved_tensors_belong_to_cannot_change(done: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="impossible"):
        train(tmp_path, done, ("optimizer",), optimizer={"kind": "adamw"})


def test_changed_data_is_refused_unless_accepted(done: Path, tmp_path: Path) -> None:
    longer: dict[str, Any] = {"train": {"horizon": "7 steps"}}
    with pytest.raises(CheckpointError, match="'train' has changed"):
        train(tmp_path, done, shift=1.0, **longer)
    assert train(tmp_path, done, ("data",), shift=1.0, **longer).step == 7


def test_a_longer_horizon_under_a_decay_is_a_change_that_matters(tmp_path: Path) -> None:
    cosine: dict[str, Any] = {"schedule": {"kind": "warmup_cosine", "warmup": 2}}
    run = train(tmp_path, **cosine).folder
    longer: dict[str, Any] = {**cosine, "train": {"horizon": "9 steps"}}
    with pytest.raises(RequestError, match="horizon"):
        train(tmp_path, run, **longer)
    assert train(tmp_path, run, ("train.horizon",), **longer).step == 9


def test_a_finished_run_that_is_resumed_still_knows_its_metrics(tmp_path: Path) -> None:
    def fit(resume: Path | None) -> RunResult:
        torch.manual_seed(0)
        data = (torch.ones(8, 2), torch.ones(8, 1))
        trainer = Trainer(
            nn.Linear(2, 1),
            data,
            squared_error,
            validation=data,
            settings={**SETTINGS, "evaluate": {"every": "3 steps"}},
            runs=tmp_path,
        )
        return trainer.fit(resume=resume)

    first = fit(None)
    assert first.metrics and fit(first.folder).metrics == first.metrics


class Failing(nn.Linear):
    """Fails once it was trained on so many batches."""

    left = 1000

    def forward(self, input: Tensor) -> Tensor:
        self.left -= self.training
        if self.left < 0:
            raise ValueError("the third sample is poison")
        return super().forward(input)


def fit_failing(
    runs: Path, left: int, resume: Path | None = None, most: int = 3, **checkpoint: Any
) -> RunResult:
    model = Failing(2, 1)
    model.left = left
    settings = {
        **SETTINGS,
        "train": {**SETTINGS["train"], "horizon": "12 steps"},
        "checkpoint": {"every": "2 steps", **checkpoint},
        "guard": {"restarts_without_progress": most},
    }
    data = (torch.ones(12, 2), torch.ones(12, 1))
    return Trainer(model, data, squared_error, settings=settings, runs=runs).fit(resume=resume)


def test_a_run_that_crashes_again_and_again_is_not_resumed_for_ever(tmp_path: Path) -> None:
    def fit(left: int, resume: Path | None = None, most: int = 3) -> RunResult:
        return fit_failing(tmp_path, left, resume, most)

    with pytest.raises(ValueError, match="poison"):
        fit(3)
    (run,) = tmp_path.iterdir()
    for _ in range(3):
        with pytest.raises(ValueError, match="poison"):
            fit(1, run)
    with pytest.raises(RunFolderError, match="resumed 3 times") as caught:
        fit(1000, run)
    assert "poison" in caught.value.where and caught.value.exit_code == EXIT_REQUEST
    assert fit(1000, run, most=4).step == 12, "with a larger number it goes on"
    assert fit(1000, run).step == 12, "and once it has got further, it counts anew"
    events = read_events(run / "events.jsonl")
    attempts = [e.data["attempt"] for e in events if e.kind in ("start", "resume")]
    assert len(attempts) == len(set(attempts)) == 6


def test_a_run_that_gets_further_is_resumed_though_a_kill_hides_its_saves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="poison"):
        fit_failing(tmp_path, 3, mode="async")
    (run,) = tmp_path.iterdir()
    log = run / "events.jsonl"
    for _ in range(4):
        # What SIGKILL leaves: the checkpoints, and no word of those that were saved beside.
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if '"kind": "save"' not in line))
        with pytest.raises(ValueError, match="poison"):
            fit_failing(tmp_path, 3, run, mode="async")
    begun = [e.step for e in read_events(log) if e.kind == "resume"]
    assert begun == [2, 4, 6, 8]


def test_what_counts_is_where_the_next_resume_begins() -> None:
    def resumed(*steps: int) -> list[Event]:
        return [Event("resume", step, "", {}) for step in steps]

    for steps, step in [((4, 4), 4), ((4, 4, 4), 8), ((8, 8, 8), 4), ((4, 4, 8, 4, 4), 4)]:
        refuse_crash_loop(resumed(*steps), 3, step)
    saved = [Event("save", 9, "", {})]
    for steps in [(4, 4, 4), (8, 8, 4, 4, 4)]:
        with pytest.raises(RunFolderError, match="beyond step 4"):
            refuse_crash_loop([*resumed(*steps), *saved], 3, 4)
    finished = [Event("finished", 4, "", {})]
    refuse_crash_loop([*resumed(4, 4, 4), *finished, *resumed(4)], 3, 4)


def _fields(model: Any, above: str = "") -> set[str]:
    found = set()
    for name, value in model:
        path = f"{above}{name}"
        found |= _fields(value, f"{path}.") if isinstance(value, Section) else {path}
    return found


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_field_of_a_recipe_is_in_one_class_on_purpose(recipe: str) -> None:
    config = load_recipe(recipe).recipe
    for path in _fields(config):
        listed = [
            path.startswith(IMPOSSIBLE_FIELDS) or path.startswith(SAFE_FIELDS),
            path.startswith(ACCEPT_FIELDS),
        ]
        assert any(listed), path
        if not listed[0]:
            assert classify(path, config) is ChangeClass.ACCEPT, path
        if not listed[1]:
            assert classify(path, config) is not ChangeClass.ACCEPT, path


def test_the_tier_of_a_resume() -> None:
    one = {"ranks": 1, "torch": "2.13.0", "device": "cuda"}
    assert resume_tier(one, one, True) is Tier.T0
    assert resume_tier(one, one, False) is Tier.T1
    assert resume_tier({**one, "device": "cpu"}, {**one, "device": "cpu"}, False) is Tier.T0
    assert resume_tier({**one, "torch": "2.12.0"}, one, True) is Tier.T1
    assert resume_tier({**one, "ranks": 2}, one, True) is Tier.T2


def test_the_tier_is_told_when_a_run_goes_on(done: Path, tmp_path: Path) -> None:
    train(tmp_path, done, train={"horizon": "8 steps"})
    (resumed,) = [e for e in read_events(done / "events.jsonl") if e.kind == "resume"]
    assert resumed.data["tier"] == "T0"
    record = json.loads((done / "record.resume-1.json").read_text())
    assert record["extra"]["resumed"]["tier"] == "T0" and record["extra"]["resumed"]["step"] == 6
    assert any("train.horizon" in change for change in record["extra"]["resumed"]["changes"])
    assert json.loads((done / "record.json").read_text())["extra"]["resumed"] is None


def test_another_global_batch_is_refused_or_accepted_by_name() -> None:
    config = resolve_settings(SETTINGS).config
    pace = Pace(samples_per_update=8)
    about = {"data": {}, "samples_per_update": 4}
    manifest = Manifest(2, "resumable", {}, {}, about)
    schedule = make_schedule(config, pace)
    with pytest.raises(RequestError, match="take 8 samples, and took 4"):
        Resumption(config).check(manifest, {}, schedule, pace)
    Resumption(config, accepted=("parallel",)).check(manifest, {}, schedule, pace)
    Resumption(config).check(manifest, {}, schedule, Pace(samples_per_update=4))


def test_another_mesh_keeps_what_another_number_of_ranks_does() -> None:
    before = {"ranks": 4, "mesh": {"shard": 4}, "device": "cpu"}
    assert resume_tier(before, {**before, "mesh": {"replicate": 4}}, True) is Tier.T2
    assert resume_tier(before, dict(before), True) is Tier.T0


def test_a_run_that_saves_once_needs_room_for_one_checkpoint_and_the_next() -> None:
    def needed(**checkpoint: Any) -> int:
        settings = {**settings_of(), "checkpoint": checkpoint}
        assembly = assembled("gpt", settings)
        with closing(assembly):
            resolved = resolve_settings(settings)
            return describe("gpt", resolved, Prepared(assembly.material), assembly).needed_bytes()

    often = needed(every="5 steps", keep=3, keep_best=1)
    assert 3 * needed(every="end", keep=3) == often
    assert needed(every="end", keep=3, ephemeral_every="5 steps") == often


def events_of(run: RunResult, kind: str) -> list[Event]:
    assert run.folder is not None
    return [event for event in read_events(run.folder / "events.jsonl") if event.kind == kind]


def test_an_accepted_change_is_another_run_and_the_event_says_its_rates(
    done: Path, tmp_path: Path
) -> None:
    again = train(
        tmp_path,
        resume=done,
        accept=("optimizer",),
        optimizer={"lr": 2.5},
        train={"horizon": "8 steps"},
    )
    (event,) = events_of(again, "resume")
    assert event.data["tier"] == "T3"
    assert event.data["rate"] == {"update": 7, "last": 0.1, "unchanged": 0.1, "now": 2.5}
    (said,) = (e.message for e in events_of(again, "note") if "learning rate" in e.message)
    assert "0.1 in update 6, 25 times" in said


def test_changes_that_change_no_number_keep_the_tier(done: Path, tmp_path: Path) -> None:
    again = train(tmp_path, resume=done, train={"horizon": "8 steps"})
    (event,) = events_of(again, "resume")
    assert event.data["tier"] == "T0" and "rate" not in event.data


def cosine(**fields: Any) -> dict[str, Any]:
    return {"kind": "warmup_cosine", "warmup": 0, "floor": 0.0, **fields}


@pytest.mark.parametrize("kind", ["warmup_cosine", "one_cycle"])
def test_a_longer_horizon_says_what_becomes_of_the_rate(kind: str, tmp_path: Path) -> None:
    schedule = cosine() if kind == "warmup_cosine" else {"kind": kind, "cycle_momentum": False}
    done = train(tmp_path, schedule=schedule).folder
    assert done is not None
    longer = {"horizon": "40 steps"}
    with pytest.raises(RequestError, match="needs --accept-change") as caught:
        train(tmp_path, resume=done, schedule=schedule, train=longer)
    assert "update 7 has the learning rate" in caught.value.rule
    assert "in update 6" in caught.value.rule and "schedule.total=begun" in caught.value.rule
    again = train(tmp_path, resume=done, accept=("train.horizon",), schedule=schedule, train=longer)
    rate = events_of(again, "resume")[0].data["rate"]
    assert rate["update"] == 7 and rate["now"] > 3 * rate["last"]
    assert f"{rate['now']:.4g}" in caught.value.rule


@pytest.mark.parametrize("kind", ["warmup_cosine", "one_cycle"])
def test_a_decay_over_the_horizon_that_was_begun_is_continued_without_a_jump(
    kind: str, tmp_path: Path
) -> None:
    schedule = cosine() if kind == "warmup_cosine" else {"kind": kind, "cycle_momentum": False}
    done = train(tmp_path, schedule=schedule).folder
    assert done is not None
    begun = {**schedule, "total": "begun"}
    again = train(tmp_path, resume=done, schedule=begun, train={"horizon": "9 steps"})
    assert again.folder is not None and again.step == 9
    rows = [row for row in read_rows(again.folder / "metrics.jsonl") if row["row"] == "step"]
    rates: list[Any] = [next(iter(row["lr"].values())) for row in rows]  # type: ignore[attr-defined]
    assert rates[6:] == [rates[6]] * 3 and rates[6] <= rates[5]
    (event,) = events_of(again, "resume")
    assert event.data["tier"] == "T0" and "rate" not in event.data
