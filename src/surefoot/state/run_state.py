"""The state of a run as one value. What is not listed here does not survive a restart.

Holds live objects and converts them to a snapshot (tensors and plain JSON values) and back. Reads
and writes no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from surefoot.core.errors import GO_ON_FROM_OLDER, CheckpointError, ModelError, RequestError
from surefoot.data.order import START, Cursor
from surefoot.data.sources.stream import StreamCursor
from surefoot.numerics.determinism import capture_rng, restore_rng
from surefoot.state.manifest import MALFORMED
from surefoot.state.reading import StoredTensors
from surefoot.state.shards import is_sharded, laid_out_like
from surefoot.state.stages import ALL_LAYERS, Layers, own_part, telling
from surefoot.state.tree import (
    RANKS_KEY,
    TENSOR_MARK,
    Snapshot,
    join_tree,
    path_part,
    split_tree,
    tensors_named,
    written_key,
)

CURSOR_KINDS: Mapping[str, type[Cursor] | type[StreamCursor]] = {
    "Cursor": Cursor,
    "StreamCursor": StreamCursor,
}


PARTS_BY_STATE_DICT = (
    "loss_scale",
    "average",
    "guard",
    "plateau",
    "stopping",
    "best",
    "progress",
)

EXTRA_STATE = "_extra_state"
"""Key at which torch's `state_dict` puts the result of a module's `get_extra_state`."""


class Stateful(Protocol):
    """Something with state of JSON values and tensors."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


class NamedOptimizer(Protocol):
    """An optimizer whose state is keyed by parameter names."""

    def state_by_name(self) -> Mapping[str, Any]: ...

    def load_state_by_name(self, state: Any) -> None: ...


@dataclass
class Progress:
    """Progress of a run: host integers, advanced once per settled update."""

    step: int = 0
    """Updates completed."""
    window: int = 0
    """Windows consumed, including skipped updates."""
    samples: int = 0
    tokens: int = 0
    cursor: Cursor | StreamCursor = START
    """Position in the data, or a stream's own state."""
    evaluated_step: int = -1
    """Step of the last evaluation, so that a resume at the end does not evaluate twice."""
    evaluation_due: bool = False
    """Whether a stop has interrupted the evaluation at this step: a resume starts with it."""
    spent_seconds: float = 0.0
    """Wall time of all attempts so far (measured)."""

    @property
    def epoch(self) -> int:
        """Epochs completed, without the current one."""
        epoch: int = self.cursor.epoch
        return epoch

    def state_dict(self) -> dict[str, Any]:
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        state["cursor"] = self.cursor.as_json()
        state["cursor_kind"] = type(self.cursor).__name__
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for f in fields(self):
            setattr(self, f.name, state[f.name])
        for name in ("step", "window", "samples", "tokens"):
            _count(state, name)
        self.cursor = CURSOR_KINDS[state["cursor_kind"]].from_json(state["cursor"])


@dataclass
class Best:
    """The best value of the deciding metric so far, and its step."""

    value: float | None = None
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.step = state["value"], state["step"]


@dataclass(frozen=True)
class RunState:
    """All live parts of a run that a checkpoint keeps: one field each, nothing else."""

    progress: Progress
    model: nn.Module
    """The unwrapped module: its keys carry no wrapper prefix."""
    optimizer: NamedOptimizer
    loss_scale: Stateful
    average: Stateful
    guard: Stateful
    plateau: Stateful
    stopping: Stateful
    best: Best
    device: Any
    """Device whose random state is kept in addition to the CPU's."""
    rank: int = 0
    """Rank of this process: each keeps its own random state."""
    layers: Layers = ALL_LAYERS
    """The layers of the model that this process holds."""

    def __post_init__(self) -> None:
        kind = type(self.model)
        # torch.compile's wrapper is recognized by an attribute: importing its class takes a second.
        if hasattr(self.model, "_orig_mod") or isinstance(
            self.model, DataParallel | DistributedDataParallel
        ):
            raise ModelError(
                f"the model is wrapped in {kind.__name__}",
                where="model",
                rule="a run takes the unwrapped module: names in its checkpoints carry no prefix",
                remedy="pass the module itself; train.compile=whole compiles it",
            )

    def capture(self, **log_offsets: int) -> Snapshot:
        """Copies nothing: the snapshot holds the live tensors. Write it before training continues.

        Args:
            log_offsets: current byte offsets of the run's logs.
        """
        snapshot = split_tree(
            {
                "progress": self.progress.state_dict(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_by_name(),
                "loss_scale": self.loss_scale.state_dict(),
                "average": self.average.state_dict(),
                "guard": self.guard.state_dict(),
                "plateau": self.plateau.state_dict(),
                "stopping": self.stopping.state_dict(),
                "best": self.best.state_dict(),
                "log_offsets": dict(log_offsets),
                RANKS_KEY: {str(self.rank): {"rng": capture_rng(self.device)}},
            }
        )
        return telling(snapshot, self.layers)

    def restore(self, snapshot: Snapshot) -> dict[str, int]:
        """Loads a snapshot into the live parts; returns the log offsets.

        Raises:
            CheckpointError: the snapshot is of another model.
        """
        with naming_state():
            snapshot = self._laid_out(own_part(snapshot, self.layers))
        weights = weights_of(snapshot)
        check_same_tensors(self.model.state_dict(), weights)
        with naming_state():
            state = join_tree(snapshot)
            self.optimizer.load_state_by_name(state["optimizer"])
            for name in PARTS_BY_STATE_DICT:
                getattr(self, name).load_state_dict(state[name])
            # Last: an error in another part must leave the weights unchanged.
            self.model.load_state_dict(weights)
            own = state[RANKS_KEY].get(str(self.rank))
            if own is not None:
                # A rank that did not exist before keeps the random state of its seed.
                restore_rng(own["rng"])
            return {str(log): _count(state["log_offsets"], log) for log in state["log_offsets"]}

    def _laid_out(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with sharded tensors read in this layout: only this rank's part of each.

        Optimizer moments and averages are sharded like their parameters.
        """
        stored = snapshot.tensors
        # Escaped as in a path, and as in older checkpoints where a '/' in a name was not escaped.
        sharded = {
            form: p
            for n, p in self.model.state_dict().items()
            for form in (path_part(n), n)
            if is_sharded(p)
        }
        if not sharded or not isinstance(stored, StoredTensors):
            return snapshot
        tensors: dict[str, Tensor] = {}
        for name in tensors_named(snapshot.values):
            live = next((p for n, p in sharded.items() if f"/{n}/" in f"{name}/"), None)
            if live is not None and stored.shape(name) == tuple(live.shape):
                tensors[name] = laid_out_like(live, partial(stored.part, name))
            else:
                tensors[name] = stored[name]
        return Snapshot(tensors, snapshot.values)


def weights_of(snapshot: Snapshot) -> dict[str, Any]:
    """The model's state, by name.

    Raises:
        CheckpointError: the snapshot has none.
    """
    with naming_state():
        return dict(join_tree(snapshot)["model"])


def averaged_weights_of(snapshot: Snapshot) -> dict[str, Any]:
    """The model's state with averaged weights in place of the trained ones, by name.

    Buffers, frozen weights and dtypes are those of the model.

    Raises:
        RequestError: the run kept no average.
        CheckpointError: the snapshot has no model.
    """
    weights = weights_of(snapshot)
    with naming_state():
        average = join_tree(snapshot)["average"]
        held = snapshot.values["model"]
        if average["kind"] == "none":
            raise RequestError(
                "the run kept no average of its weights",
                where="average",
                rule="`ema.kind=on` keeps one",
                remedy="use the raw weights",
            )
        # A tied tensor is averaged once under one of its names, and used for all of them.
        averages = {
            held[written_key(name)][TENSOR_MARK]: mean for name, mean in average["weights"].items()
        }

        def averaged(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            path = held[written_key(name)][TENSOR_MARK]
            return averages[path].to(value.dtype) if path in averages else value

        return {name: averaged(name, value) for name, value in weights.items()}


@contextmanager
def naming_state() -> Iterator[None]:
    """Context manager: errors of reading state become errors of the checkpoint.

    Raises:
        CheckpointError: with what was wrong.
    """
    try:
        yield
    except MALFORMED as error:
        raise CheckpointError(
            f"the state of the checkpoint has an unexpected form: {type(error).__name__}: {error}",
            rule="a checkpoint has every part of a run's state, each in its own form",
            remedy=f"{GO_ON_FROM_OLDER}; or resume with the version that wrote it",
        ) from error


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, not a count")
    return value


def check_same_tensors(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    most_named: int = 5,
    *,
    same_dtype: bool = True,
) -> None:
    """Refuses tensors that differ in name, shape or dtype; the error names the first ones.

    Entries that are not tensors are compared by name only, and so is extra state of any form,
    which may change from one update to the next.

    Args:
        ours: the model's state.
        theirs: the checkpoint's.
        most_named: how many differences the error names.
        same_dtype: False if weights are only a start and are converted.

    Raises:
        CheckpointError: with up to `most_named` differences.
    """
    differences = []
    for name in sorted(ours.keys() | theirs.keys()):
        forms = zip(_form(theirs, name), _form(ours, name), strict=True)
        for other, mine in forms if same_dtype else [next(forms)]:
            if mine != other:
                differences.append(f"{name}: checkpoint {other}, model {mine}")
                break
    if differences:
        shown = "; ".join(differences[:most_named])
        more = len(differences) - most_named
        raise CheckpointError(
            f"the checkpoint is of another model: {len(differences)} tensors differ",
            where=shown + (f"; and {more} more" if more > 0 else ""),
            rule="the same tensors, by name, shape and dtype",
            remedy="use the recipe of that run, or start a new run from its weights",
        )


def _form(state: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Shape and dtype, or a text in place of them."""
    if name not in state:
        return "missing", ""
    if name.rpartition(".")[2] == EXTRA_STATE:
        return "an extra state", ""
    value = state[name]
    if not isinstance(value, Tensor):
        return "not a tensor", ""
    return str(tuple(value.shape)), str(value.dtype).removeprefix("torch.")
