"""The face of the library: train your own model on your own data, in one object.

It only turns what it is given into the parts that a recipe would name; everything that happens
afterwards is the same code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from surefoot.assembly.given_parts import GivenParts, OwnParts, check_names
from surefoot.assembly.material import Prepared
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Assembly, Material, assemble
from surefoot.config.load import Resolved, resolve_settings
from surefoot.config.sections import Settings
from surefoot.config.yaml_text import read_yaml
from surefoot.core.errors import RequestError
from surefoot.data.sources.datasets import as_source
from surefoot.observe.observers import as_observer
from surefoot.observe.run_folder import CONFIG_NAME, MAX_NAME_LENGTH, RunFolder, read_config
from surefoot.run.folder_run import RunResult
from surefoot.run.session import RunHooks, RunRequest, start_run
from surefoot.run.start import ResumeRequest
from surefoot.tasks.given import as_task, checked_model, with_metrics
from surefoot.tasks.task import LossSum, Task


class Trainer:
    """Trains a model: one run with a record, checkpoints and an exact resume.

    Args:
        model: any module; what has `requires_grad` is trained.
        data: a map-style dataset, arrays or tensors (one, a tuple or a dict), a stream with its own
            state, or a source. Not a DataLoader: batches are made here, so that a resume is exact.
            In samples with names, `forward` is passed the entries that it names, and the target is
            the entry `labels`, `label`, `targets`, `target` or `y`.
        task: one of `surefoot.tasks`, or a plain `loss(model, batch) -> sum` over the samples of
            the batch; give `FunctionTask(loss, weight_fn)` where a loss counts something else.
        validation: one data set, or several by name.
        settings: the sections of a recipe but model, data and task; `train.horizon` and
            `train.micro_batch` have no default. `surefoot show config diabetes-mlp` lists all keys;
            the run's `config.yaml` holds the value of each.
        runs: the folder in which the run folder is made.
        parts: of your own, by name: `metrics`, `observers`, `optimizer`, `schedule`, `clip` and
            `sampler`; see `surefoot.assembly.given_parts.OwnParts`.

    Raises:
        ConfigError: everything that is wrong with the settings, at once.
        DataError: the data is none that can be trained on.
        RequestError: the model is no module, the task no task, or a part cannot be used.

    >>> import tempfile, torch
    >>> inputs, targets = torch.randn(32, 4), torch.randn(32, 1)
    >>> trainer = Trainer(
    ...     nn.Linear(4, 1),
    ...     (inputs, targets),
    ...     lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).sum(),
    ...     settings={
    ...         "train": {"horizon": "3 steps", "micro_batch": 8},
    ...         "optimizer": {"lr": 0.01},
    ...         "log": {"console": "off"},
    ...     },
    ...     optimizer=torch.optim.RAdam,
    ...     runs=tempfile.mkdtemp(),
    ... )
    >>> trainer
    Trainer('linear', 32 samples, RAdam, horizon 3 steps)
    >>> trainer.fit().step
    3
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        task: Task | Callable[[nn.Module, Any], LossSum],
        *,
        validation: Any = None,
        settings: Mapping[str, Any] | Settings,
        runs: str | Path = "runs",
        **parts: Unpack[OwnParts],
    ) -> None:
        check_names(parts)
        given = GivenParts.of(
            parts.get("optimizer"), parts.get("schedule"), parts.get("clip"), parts.get("sampler")
        )
        self.resolved: Resolved[Settings] = resolve_settings(settings, given=given.names())
        self.name = _run_name(model)
        self._material = Material(
            model=checked_model(model),
            task=with_metrics(as_task(task), parts.get("metrics") or {}),
            train=as_source(data, "training data"),
            validation=_sources(validation),
            given=given,
        )
        self._observers = tuple(map(as_observer, parts.get("observers", ())))
        self._runs = Path(runs).absolute()

    def __repr__(self) -> str:
        settings, train = self.resolved.config, self._material.train
        size = f"{len(train):,} samples" if hasattr(train, "__len__") else "a stream"
        optimizer = getattr(settings.optimizer, "target", "none").rpartition(":")[2]
        kind = settings.optimizer.kind if optimizer == "none" else optimizer
        return f"Trainer({self.name!r}, {size}, {kind}, horizon {settings.train.horizon})"

    def fit(self, resume: str | Path | None = None, accept: Sequence[str] = ()) -> RunResult:
        """Trains to the horizon.

        Args:
            resume: a run folder to go on with, from its newest whole checkpoint; or one of its
                checkpoints: newer ones are put aside.
            accept: settings that may differ from those of the resumed run; `data` for changed data,
                `metrics.jsonl` for a log that does not fit and is begun anew.

        Returns:
            The run folder, how it ended, its latest metrics and the model.

        Raises:
            SurefootError: the run cannot start, or failed; its folder says how.
        """
        # Once, before any code of the user's own may change the working directory.
        run = None if resume is None else Path(resume).absolute()
        return start_run(
            RunRequest(
                self.name,
                self.resolved,
                prepare=lambda resuming: Prepared(self._material),
                make_folder=lambda needed_bytes: RunFolder.create(
                    self._runs, self.name, needed_bytes=needed_bytes
                ),
                resume=None if run is None else ResumeRequest(run, _read_settings, tuple(accept)),
                hooks=RunHooks(self._observers, say=self._say),
            )
        )

    def _say(self, text: str) -> None:
        if self.resolved.config.log.console != "off":
            print(text, file=sys.stderr, flush=True)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the model as it is now, as SET/METRIC; leaves no trace."""
        assembly = self._assemble()
        try:
            reports = assembly.evaluator.run(0)
        finally:
            assembly.close()
        return {f"{r.name}/{name}": value for r in reports for name, value in r.metrics.items()}

    def _assemble(self) -> Assembly:
        settings = self.resolved.config
        return assemble(self._material, settings, prepare_process(settings))


def _read_settings(run: Path) -> Resolved[Settings]:
    return resolve_settings(read_yaml(read_config(run), CONFIG_NAME)[0])


def _sources(validation: Any) -> dict[str, Any]:
    if validation is None:
        return {}
    if isinstance(validation, Mapping) and not _is_arrays(validation):
        for name in validation:
            if not isinstance(name, str) or not name:
                raise RequestError(
                    f"a validation set is called {name!r}",
                    rule="names of validation sets are strings that are not empty",
                    remedy=f"call it {str(name) or 'validation'!r}",
                )
        return {name: as_source(data, name) for name, data in validation.items()}
    return {"validation": as_source(validation, "validation data")}


def _is_arrays(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is one data set of named arrays of one length."""
    sizes = {value.shape[0] if getattr(value, "ndim", 0) else None for value in data.values()}
    return len(sizes) == 1 and None not in sizes


def _run_name(model: nn.Module) -> str:
    """The name of the model's class, as far as it can be part of a folder's name."""
    name = re.sub(r"[^a-z0-9._-]", "-", type(model).__name__.lower()).strip("._-")
    return name[:MAX_NAME_LENGTH] or "model"
