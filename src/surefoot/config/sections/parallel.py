"""How a run is laid out over its ranks. What the sizes must multiply to is checked elsewhere."""

from __future__ import annotations

from typing import Literal

from surefoot.config.fields import AutoSize, Duration, Section, Whole
from surefoot.core.units import Seconds


class ParallelSection(Section):
    """Sizes of the axes of the mesh. Their product is the number of ranks."""

    replicate: AutoSize = "auto"
    """Whole copies of the model, each with its own data; `auto` is what the other axes leave."""
    shard: AutoSize = 1
    """Ranks that hold parts of one copy, each with its own data."""
    tensor: AutoSize = 1
    """Ranks that compute parts of each layer, with the same data."""
    context: AutoSize = 1
    """Ranks that hold parts of each sequence."""
    context_exchange: Literal["all-to-all", "ring"] = "all-to-all"
    """How they attend to each other: heads for places and back (Ulysses), or keys and values passed
    around (ring), for more ranks than there are heads."""
    pipeline: AutoSize = 1
    """Ranks that hold different layers."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """In which order the micro-batches of a window pass the stages, forward and backward."""
    stages_per_rank: Whole | Literal["as-schedule"] = "as-schedule"
    """Stages on each rank: 2 or more for `interleaved` (2 unless said), 2 for `zero-bubble`, else
    1."""
    expert: AutoSize = 1
    """Ranks that hold different experts."""
    shards: Literal["optimizer", "gradients", "parameters"] = "parameters"
    """What `shard` cuts: optimizer state (ZeRO-1), also gradients (2), also parameters (3)."""
    reduce: Literal["as-shards", "window", "micro-batch"] = "as-shards"
    """When gradients are reduced: once per window, or after each micro-batch, which sharded
    gradients need; `as-shards` does what `shards` needs."""
    gather: Literal["as-stored", "as-computed"] = "as-stored"
    """Sharded parameters travel as they are stored, or in the precision of the forward: half the
    traffic under bf16, and then norms run in bf16 too."""
    cut_sequence: bool = False
    """With `tensor`: norms see parts of the sequence (sequence parallel), which saves memory."""
    cut_logits: bool = False
    """With `tensor`: the scores of next tokens stay cut over the vocabulary (loss parallel)."""
    unused_parameters: Literal["refuse", "find"] = "refuse"
    """Parameters that a replica's loss does not depend on: an error, or looked for each time."""
    deadline: Duration = Seconds(600)
    """Longest wait for another rank."""
