"""Parallel layout of a run. The product of the sizes is checked elsewhere."""

from __future__ import annotations

from typing import Literal

from surefoot.config.fields import AutoSize, Duration, Section, Whole
from surefoot.core.units import Seconds


class ParallelSection(Section):
    """Sizes of the mesh axes. Their product is the number of ranks."""

    replicate: AutoSize = "auto"
    """Number of model replicas, each with its own data; `auto`: what the other axes leave."""
    shard: AutoSize = 1
    """Number of ranks that shard one replica (FSDP), each with its own data."""
    tensor: AutoSize = 1
    """Number of ranks that compute parts of each layer (tensor parallel), with the same data."""
    context: AutoSize = 1
    """Number of ranks that hold parts of each sequence (context parallel)."""
    context_exchange: Literal["all-to-all", "ring"] = "all-to-all"
    """Attention over the parts: exchange heads for positions (Ulysses), or pass keys and values
    around a ring, for more ranks than heads."""
    pipeline: AutoSize = 1
    """Number of ranks that hold different layers (pipeline stages)."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """Order in which the micro-batches of a window pass through the stages."""
    stages_per_rank: Whole | Literal["as-schedule"] = "as-schedule"
    """Number of stages per rank: 2 or more for `interleaved` (default 2), 2 for `zero-bubble`, else
    1."""
    expert: AutoSize = 1
    """Number of ranks that hold different experts."""
    shards: Literal["optimizer", "gradients", "parameters"] = "parameters"
    """What `shard` shards: optimizer state (ZeRO-1), also gradients (2), also parameters (3)."""
    reduce: Literal["as-shards", "window", "micro-batch"] = "as-shards"
    """When gradients are reduced: once per window, or after each micro-batch, which sharded
    gradients need; `as-shards`: what `shards` needs."""
    gather: Literal["as-stored", "as-computed"] = "as-stored"
    """Gather sharded parameters as they are stored, or in the precision of the forward: half the
    traffic under bf16, but norms then run in bf16, too."""
    cut_sequence: bool = False
    """With `tensor`: norms work on parts of the sequence (sequence parallel), to save memory."""
    cut_logits: bool = False
    """With `tensor`: logits stay sharded over the vocabulary (loss parallel)."""
    unused_parameters: Literal["refuse", "find"] = "refuse"
    """Parameters unused by a replica's loss: an error, or searched for in each backward."""
    deadline: Duration = Seconds(600)
    """Longest wait for another rank."""
