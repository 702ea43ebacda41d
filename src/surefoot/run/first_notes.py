"""What is unusual about a run, said once when it starts. Changes nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.assembly.run_parts import Assembly
from surefoot.data.fetch import collated
from surefoot.data.second_look import second_look
from surefoot.data.sources.stream import by_index, first_samples
from surefoot.numerics.determinism import preserved_rng
from surefoot.optim.registry import optimizer_notes
from surefoot.run.own_parts import own_parts
from surefoot.tasks.calling import plan_call
from surefoot.tasks.task import FunctionTask


def notes_of(assembly: Assembly) -> Iterator[str]:
    """What is unusual about the optimizer, the loss and the data."""
    yield from optimizer_notes(assembly.settings.optimizer, assembly.trainable.optimizing.ledger)
    for name, text in own_parts(assembly).items():
        yield f"own {name}: {text}"
    chosen = assembly.compilation
    if chosen.extent != "off" and chosen.reason:
        yield (
            f"train.compile=auto compiles {chosen.extent} ({chosen.reason}): the first update "
            "takes some 10 to 30 s longer; train.compile=off leaves it"
        )
    if unknown := assembly.pace.flops_unknown:
        yield f"no utilization (MFU): the operations of a sample were not counted: {unknown}"
    material = assembly.material
    if assembly.coupling:
        yield assembly.coupling + split_of(assembly)
    for source in (material.train, *material.validation.values()):
        if (indexed := by_index(source)) is not None:
            with preserved_rng(assembly.trainable.device):
                yield from second_look(indexed)
    if isinstance(material.task, FunctionTask):
        return
    with preserved_rng(assembly.trainable.device):
        if not (first := first_samples(material.train, 1)):
            return
        batch = collated(material.train, first, [0])
    if unused := plan_call(material.model, batch).unused:
        yield f"the data holds {', '.join(unused)}, which the model's forward does not take"


def split_of(assembly: Assembly) -> str:
    """Into how many parts a window is split, and what to do where that must not be."""
    parts = assembly.settings.train.accumulation
    ranks = assembly.place.num_data_ranks
    if parts * ranks == 1:
        return ""
    return (
        f". THIS RUN SPLITS each window into {parts * ranks} (train.accumulation={parts}, {ranks} "
        f"data-parallel rank{'s' if ranks > 1 else ''}): use one micro-batch on one rank where the "
        'whole batch is meant, or declare it: FunctionTask(..., depends_on_split={"loss": "why"})'
    )
