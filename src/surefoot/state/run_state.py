"""Everything that must survive, as one value. What is not listed here does not survive.

Holds live parts and turns them into a snapshot (tensors and plain JSON values) and back. It never
touches a file.
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
"""Where `state_dict` of torch puts what a module's `get_extra_state` gives."""


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
    """How far a run has come: host integers, advanced once per settled update."""

    step: int = 0
    """Updates completed."""
    window: int = 0
    """Windows consumed, skipped updates included."""
    samples: int = 0
    tokens: int = 0
    cursor: Cursor | StreamCursor = START
    """Where the data stands: a position, or a stream's own state."""
    evaluated_step: int = -1
    """Step of the last evaluation, so that a resume at the end does not evaluate twice."""
    evaluation_due: bool = False
    """Whether a stop has cut the evaluation at this step: a resume begins with it."""
    spent_seconds: float = 0.0
    """Wall time of all attempts so far (measured)."""

    @property
    def epoch(self) -> int:
        """Epochs completed, the current one not counted."""
        epoch: int = self.cursor.epoch
        return epoch

    def consume(self, samples: int, tokens: int, cursor: Any, applied: bool) -> None:
        """Counts one settled update."""
        self.step += applied
        self.window += 1
        self.samples += samples
        self.tokens += tokens
        self.cursor = cursor

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
    """The best value of the deciding metric so far, and the step that reached it."""

    value: float | None = None
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.step = state["value"], state["step"]


@dataclass(frozen=True)
class RunState:
    """Every living part of a run that a checkpoint keeps. One field, one entry; no other state."""

    progress: Progress
    model: nn.Module
    """The bare module: its keys carry no wrapper prefix."""
    optimizer: NamedOptimizer
    loss_scale: Stateful
    average: Stateful
    guard: Stateful
    plateau: Stateful
    stopping: Stateful
    best: Stateful
    device: Any
    """Device whose random state is kept beside the CPU's."""
    rank: int = 0
    """Rank of this process: each keeps a random state of its own."""
    layers: Layers = ALL_LAYERS
    """Which layers of the model this process has."""

    def __post_init__(self) -> None:
        kind = type(self.model)
        # torch.compile's wrapper is known by what it holds: importing its class takes a second.
        if hasattr(self.model, "_orig_mod") or isinstance(
            self.model, DataParallel | DistributedDataParallel
        ):
            raise ModelError(
                f"the model is wrapped in {kind.__name__}",
                where="model",
                rule="a run takes the bare module: the names in its checkpoints carry no prefix",
                remedy="hand in the module itself; train.compile=whole compiles it",
            )

    def capture(self, **log_offsets: int) -> Snapshot:
        """Copies nothing: the snapshot's tensors are the live ones. Write it before going on.

        Args:
            log_offsets: byte offsets of the run's logs at this moment.
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
        """Puts a snapshot back into the live parts; returns the log offsets.

        Raises:
            CheckpointError: the snapshot belongs to another model.
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
            # Last: what another part refuses must leave the weights as they are.
            self.model.load_state_dict(weights)
            own = state[RANKS_KEY].get(str(self.rank))
            if own is not None:
                # A rank that was not there before keeps the random state of its seed.
                restore_rng(own["rng"])
            return {str(log): _count(state["log_offsets"], log) for log in state["log_offsets"]}

    def _laid_out(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with sharded tensors read as they lie here: only this rank's part of each.

        Moments and averages lie as the parameter does that they belong to.
        """
        stored = snapshot.tensors
        # As it stands in a path, and as it did where a '/' in a name was not escaped.
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
        CheckpointError: the snapshot holds none.
    """
    with naming_state():
        return dict(join_tree(snapshot)["model"])


def averaged_weights_of(snapshot: Snapshot) -> dict[str, Any]:
    """The model's state with the averaged weights in place of the trained ones, by name.

    Buffers and frozen weights are the model's own; number types too.

    Raises:
        RequestError: the run kept no average.
        CheckpointError: the snapshot holds no model.
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
                remedy="take the raw weights",
            )
        # A tied tensor is averaged once and has several names: all say where the one is written.
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
    """What a state of an unexpected form raises becomes an error of the checkpoint.

    Raises:
        CheckpointError: with what was wrong.
    """
    try:
        yield
    except MALFORMED as error:
        raise CheckpointError(
            f"the state of the checkpoint has an unexpected form: {type(error).__name__}: {error}",
            rule="a checkpoint holds every part of a run's state, each of its own form",
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
    """Refuses tensors that differ in name, shape or number type, and names the first that do.

    What is no tensor is compared by name only, and so is an extra state, whatever it is: its form
    is the module's own business and may change from one update to the next.

    Args:
        ours: the model's state.
        theirs: the checkpoint's.
        most_named: how many differences are named.
        same_dtype: False where weights are only a start, and are converted.

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
            rule="the same tensors, by name, shape and number type",
            remedy="use the recipe of that run, or start a new run from its weights",
        )


def _form(state: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Shape and number type, or what stands in their place."""
    if name not in state:
        return "missing", ""
    if name.rpartition(".")[2] == EXTRA_STATE:
        return "an extra state", ""
    value = state[name]
    if not isinstance(value, Tensor):
        return "no tensor", ""
    return str(tuple(value.shape)), str(value.dtype).removeprefix("torch.")
