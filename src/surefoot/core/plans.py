"""Parallel plans as data: how the layers of a model may be distributed over ranks, by name pattern.

A plan belongs to a family of models; it is chosen by the names of a model's parameters, so that
another library's class of the same family is recognized, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase


class TensorStyle(Enum):
    """How one layer is sharded along the tensor axis."""

    VOCABULARY = "vocabulary"
    """An embedding: each rank holds some of the rows."""
    COLUMNS = "columns"
    """A linear layer whose outputs are sharded."""
    ROWS = "rows"
    """A linear layer whose inputs are sharded; its partial outputs are summed."""
    LOGITS = "logits"
    """The last linear layer: its outputs are sharded, and gathered for the loss."""
    WHOLE = "whole"
    """A norm: every rank holds and computes all of it, or its part of the sequence."""
    PER_HEAD = "per-head"
    """A norm inside attention: every rank holds all of it and computes its own heads."""


@dataclass(frozen=True)
class TensorPlan:
    """The tensor styles of a family's layers.

    Args:
        name: of the family.
        styles: pattern of the layer's dotted name to its style; the first match is used.
        sizes: what the tensor axis must divide, as fields of the model's configuration.
        gathered: pattern of the modules whose first input is gathered under sequence
            parallelism, and their number of inputs; empty if the family does not support it.
    """

    name: str
    styles: Mapping[str, TensorStyle]
    sizes: tuple[str, ...]
    gathered: Mapping[str, int] = field(default_factory=dict)

    def style(self, layer: str) -> TensorStyle | None:
        """The style of a layer; None if the plan does not know it."""
        return next((s for p, s in self.styles.items() if fnmatchcase(layer, p)), None)

    def unknown(self, layers: Iterable[str]) -> list[str]:
        """Layers with parameters that the plan does not know."""
        return [layer for layer in layers if self.style(layer) is None]


GPT_PLAN = TensorPlan(
    name="gpt",
    styles={
        "token_embedding": TensorStyle.VOCABULARY,
        "position_embedding": TensorStyle.VOCABULARY,
        "blocks.*.attention.query": TensorStyle.COLUMNS,
        "blocks.*.attention.key": TensorStyle.COLUMNS,
        "blocks.*.attention.value": TensorStyle.COLUMNS,
        "blocks.*.attention.output": TensorStyle.ROWS,
        "blocks.*.feedforward.input": TensorStyle.COLUMNS,
        "blocks.*.feedforward.gate": TensorStyle.COLUMNS,
        "blocks.*.feedforward.output": TensorStyle.ROWS,
        "blocks.*_norm": TensorStyle.WHOLE,
        "norm": TensorStyle.WHOLE,
        "head": TensorStyle.LOGITS,
    },
    sizes=("num_heads", "num_kv_heads", "feedforward_dim", "vocabulary_size"),
    gathered={"blocks.*.attention": 3, "blocks.*.feedforward": 1},
)

LLAMA_PLAN = TensorPlan(
    name="llama",
    styles={
        "model.embed_tokens": TensorStyle.VOCABULARY,
        "model.layers.*.self_attn.q_norm": TensorStyle.PER_HEAD,
        "model.layers.*.self_attn.k_norm": TensorStyle.PER_HEAD,
        "model.layers.*.self_attn.[qkv]_proj": TensorStyle.COLUMNS,
        "model.layers.*.self_attn.o_proj": TensorStyle.ROWS,
        "model.layers.*.mlp.gate_proj": TensorStyle.COLUMNS,
        "model.layers.*.mlp.up_proj": TensorStyle.COLUMNS,
        "model.layers.*.mlp.down_proj": TensorStyle.ROWS,
        "model.layers.*_layernorm": TensorStyle.WHOLE,
        "model.norm": TensorStyle.WHOLE,
        "lm_head": TensorStyle.LOGITS,
    },
    sizes=("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
)
"""Llama, Qwen 2 and 3 and Mistral, by transformers' layer names. Their forward counts positions
from the output of the embedding, so the sequence is not sharded."""

TENSOR_PLANS = (GPT_PLAN, LLAMA_PLAN)


def plan_for(layers: Iterable[str]) -> TensorPlan | None:
    """The plan that knows all of these layers with parameters."""
    named = list(layers)
    return next((plan for plan in TENSOR_PLANS if not plan.unknown(named)), None)


class StageStyle(Enum):
    """What replaces a layer on the stages that do not hold it."""

    ENTRY = "entry"
    """The embedding, on the first stage; elsewhere the output of the previous stage."""
    ADDED = "added"
    """Held by the first stage and added to the embedding; elsewhere zero."""
    FIRST = "first"
    """Held by the first stage; elsewhere the identity."""
    LAST = "last"
    """Held by the last stage; elsewhere the identity."""


@dataclass(frozen=True)
class PipelinePlan:
    """How a family's layers are split into stages.

    Args:
        name: of the family.
        blocks: dotted name of the list of repeated layers; each stage holds a run of them.
        others: dotted names of all other layers with parameters or random numbers.
        width: field of the model's configuration: the last dim of activations between blocks,
            [batch, sequence, width].
    """

    name: str
    blocks: str
    others: Mapping[str, StageStyle]
    width: str

    def unknown(self, layers: Iterable[str]) -> list[str]:
        """Layers with parameters that the plan does not know."""
        inside = f"{self.blocks}."
        return [n for n in layers if n not in self.others and not n.startswith(inside)]


GPT_STAGES = PipelinePlan(
    name="gpt",
    blocks="blocks",
    others={
        "token_embedding": StageStyle.ENTRY,
        "position_embedding": StageStyle.ADDED,
        "dropout": StageStyle.FIRST,
        "norm": StageStyle.LAST,
        "head": StageStyle.LAST,
    },
    width="embedding_dim",
)

LLAMA_STAGES = PipelinePlan(
    name="llama",
    blocks="model.layers",
    others={
        "model.embed_tokens": StageStyle.ENTRY,
        "model.norm": StageStyle.LAST,
        "lm_head": StageStyle.LAST,
    },
    width="hidden_size",
)

PIPELINE_PLANS = (GPT_STAGES, LLAMA_STAGES)


def stages_for(layers: Iterable[str]) -> PipelinePlan | None:
    """The plan that knows all of these layers with parameters, including the blocks."""
    named = list(layers)
    for plan in PIPELINE_PLANS:
        if not plan.unknown(named) and any(n.startswith(f"{plan.blocks}.") for n in named):
            return plan
    return None


@dataclass(frozen=True)
class ContextPlan:
    """Where positions of a sequence interact in a family's models.

    Args:
        name: of the family.
        attention: pattern of the modules that take query, key and value, each [batch, heads,
            sequence, head dim], and return the same shape; positions interact nowhere else.
        whole: names of modules whose first input, [batch, sequence], must be unsharded.
        heads: what the context axis must divide, as fields of the model's configuration.
        longest: field of the model's configuration: longest sequence.
    """

    name: str
    attention: str
    whole: tuple[str, ...]
    heads: tuple[str, ...]
    longest: str

    def exchanges(self, module: str) -> bool:
        """Whether heads are exchanged around this module."""
        same_depth = module.count(".") == self.attention.count(".")
        return same_depth and fnmatchcase(module, self.attention)


GPT_CONTEXT = ContextPlan(
    name="gpt",
    attention="blocks.*.attention.core",
    whole=("document_mask",),
    heads=("num_heads", "num_kv_heads"),
    longest="sequence_length",
)

CONTEXT_PLANS = (GPT_CONTEXT,)


def context_for(modules: Iterable[str]) -> ContextPlan | None:
    """The plan whose attention is among these modules."""
    named = list(modules)
    return next((p for p in CONTEXT_PLANS if any(map(p.exchanges, named))), None)
