"""A decoder-only transformer, in the style of GPT-2 or Llama by configuration.

Returns logits; knows no loss, labels or devices. Attention uses torch's scaled dot product
attention, so that the fastest kernel of the device is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.core.errors import ModelError
from surefoot.models.attention import AttentionCore, DocumentMask
from surefoot.models.moe import Experts, MoEConfig, RoutedFeedForward


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Shape and style of a decoder. `gpt2` and `llama` fill in the usual values.

    Args:
        vocabulary_size: V. A multiple of 64 makes the last matrix product faster on GPUs.
        sequence_length: longest sequence, in tokens.
        num_heads: query heads; divides `embedding_dim`.
        num_kv_heads: key and value heads; divides `num_heads` (if smaller: grouped-query attention,
            Ainslie et al. 2023).
        feedforward_dim: hidden width of the feed-forward layer.
        norm: `layernorm`, or `rmsnorm` (Zhang & Sennrich 2019); before each layer (pre-norm).
        activation: `gelu` (exact, by erf), or `swiglu`: `silu(W1 x) * W3 x` (Shazeer 2020).
        positions: `learned` embeddings, or `rope`: rotary (Su et al. 2021).
        tied: the output matrix is the token embedding.
        dropout: probability, on embeddings, attention weights and the output of each layer.
        bias: biases in linear layers and LayerNorm.
        norm_epsilon: added to the variance in each norm.
        rope_base: base of the rotation wavelengths.
        experts: replaces feed-forward layers by routed ones, whose experts have no biases; may be
            a mapping of its fields. `none`: all are dense.
    """

    vocabulary_size: int
    sequence_length: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embedding_dim: int
    feedforward_dim: int
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    positions: Literal["learned", "rope"] = "rope"
    tied: bool = True
    dropout: float = 0.0
    bias: bool = False
    norm_epsilon: float = 1e-5
    rope_base: float = 10000.0
    experts: MoEConfig | Literal["none"] = "none"

    def __post_init__(self) -> None:
        if isinstance(self.experts, Mapping):
            object.__setattr__(self, "experts", MoEConfig(**self.experts))
        broken = [
            f"{name} = {getattr(self, name)} is not positive"
            for name in (
                "vocabulary_size",
                "sequence_length",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "embedding_dim",
                "feedforward_dim",
            )
            if getattr(self, name) < 1
        ]
        if not broken:
            broken += self._broken_ratios()
        if not 0.0 <= self.dropout < 1.0:
            broken.append(f"dropout = {self.dropout} is not in [0, 1)")
        if broken:
            raise ModelError(
                "this decoder cannot be built: " + "; ".join(broken),
                where="GPTConfig",
                rule="positive sizes; heads divide embedding_dim, kv heads divide heads",
                remedy="change the named sizes",
            )

    def _broken_ratios(self) -> list[str]:
        broken = []
        if self.embedding_dim % self.num_heads:
            broken.append(
                f"num_heads = {self.num_heads} does not divide embedding_dim = {self.embedding_dim}"
            )
        elif self.positions == "rope" and self.head_dim % 2:
            broken.append(f"rope needs an even head_dim, not {self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            broken.append(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}"
            )
        return broken

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.embedding_dim // self.num_heads

    @classmethod
    def gpt2(
        cls,
        *,
        vocabulary_size: int,
        sequence_length: int,
        num_layers: int,
        num_heads: int,
        embedding_dim: int,
        **changes: Any,
    ) -> GPTConfig:
        """GPT-2 style (Radford et al. 2019): LayerNorm, GELU, learned positions, tied, biases.

        The feed-forward width is 4 * embedding_dim. `changes` overrides any other field.
        """
        fields: dict[str, Any] = {
            "num_kv_heads": num_heads,
            "feedforward_dim": 4 * embedding_dim,
            "norm": "layernorm",
            "activation": "gelu",
            "positions": "learned",
            "tied": True,
            "bias": True,
        }
        return cls(
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
            num_layers=num_layers,
            num_heads=num_heads,
            embedding_dim=embedding_dim,
            **(fields | changes),
        )

    @classmethod
    def llama(
        cls,
        *,
        vocabulary_size: int,
        sequence_length: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        embedding_dim: int,
        **changes: Any,
    ) -> GPTConfig:
        """Llama style (Touvron et al. 2023): RMSNorm, SwiGLU, rotary positions, untied, no biases.

        The feed-forward width is 8/3 * embedding_dim, rounded up to a multiple of 64: three
        matrices with about as many weights as GPT-2's two. `changes` overrides any other field.
        """
        fields: dict[str, Any] = {
            "feedforward_dim": -(-8 * embedding_dim // 192) * 64,
            "norm": "rmsnorm",
            "activation": "swiglu",
            "positions": "rope",
            "tied": False,
            "bias": False,
        }
        return cls(
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            embedding_dim=embedding_dim,
            **(fields | changes),
        )


RESIDUAL_WRITERS = ("attention.output", "feedforward.output", "feedforward.shared.output")
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each [S, head_dim] or [B, 1, S, head_dim]."""


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.embedding_dim, eps=config.norm_epsilon)
    return nn.LayerNorm(config.embedding_dim, eps=config.norm_epsilon, bias=config.bias)


def _rotate(values: Tensor, rotation: Rotation) -> Tensor:
    """Rotates pairs (i, i + head_dim / 2) of [B, H, S, head_dim], in the dtype of the tables."""
    cosines, sines = rotation
    first, second = values.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (values * cosines + turned * sines).to(values.dtype)


class Attention(nn.Module):
    """Causal self-attention with as many or fewer key-value heads than query heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.core = AttentionCore(config.num_kv_heads != config.num_heads, config.dropout)
        kv_dim = config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.embedding_dim, config.embedding_dim, bias=config.bias)
        self.key = nn.Linear(config.embedding_dim, kv_dim, bias=config.bias)
        self.value = nn.Linear(config.embedding_dim, kv_dim, bias=config.bias)
        self.output = nn.Linear(config.embedding_dim, config.embedding_dim, bias=config.bias)

    def forward(self, hidden: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """[B, S, D] to [B, S, D]; `mask` [B, 1, S, S] is True where a position may attend."""
        batch, length, _ = hidden.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)

        query, key, value = (
            heads(self.query(hidden)),
            heads(self.key(hidden)),
            heads(self.value(hidden)),
        )
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        mixed = self.core(query, key, value, mask)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """`W2 gelu(W1 x)`, or with SwiGLU `W2 (silu(W1 x) * W3 x)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.input = nn.Linear(config.embedding_dim, config.feedforward_dim, bias=config.bias)
        if self.gated:
            self.gate = nn.Linear(config.embedding_dim, config.feedforward_dim, bias=config.bias)
        self.output = nn.Linear(config.feedforward_dim, config.embedding_dim, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        if self.gated:
            activated = F.silu(self.gate(hidden)) * self.input(hidden)
        else:
            activated = F.gelu(self.input(hidden))
        out: Tensor = self.output(activated)
        return out


def _feedforward(config: GPTConfig, layer: int) -> nn.Module:
    experts = config.experts
    if experts == "none" or not experts.is_routed(layer):
        return FeedForward(config)
    width = config.feedforward_dim if experts.expert_dim == "as-dense" else experts.expert_dim
    shared = experts.shared_experts
    return RoutedFeedForward(
        experts,
        config.embedding_dim,
        width,
        gated=config.activation == "swiglu",
        shared=FeedForward(replace(config, feedforward_dim=shared * width)) if shared else None,
    )


class Block(nn.Module):
    """One layer: `x + attention(norm(x))`, then `x + feedforward(norm(x))`."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.feedforward_norm = _norm(config)
        self.feedforward = _feedforward(config, layer)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """[B, S, D] to [B, S, D]; `mask` [B, 1, S, S] is True where a position may attend."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), rotation, mask))
        out: Tensor = hidden + self.dropout(self.feedforward(self.feedforward_norm(hidden)))
        return out


class GPT(nn.Module):
    """Token ids to next-token logits.

    Weights are initialized as in GPT-2: normal with standard deviation 0.02, the two projections
    that write to the residual stream 0.02 / sqrt(2 * num_layers), biases 0, norms 1.
    """

    rope_cosines: Tensor
    rope_sines: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary_size, config.embedding_dim)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.sequence_length, config.embedding_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.document_mask = DocumentMask()
        self.blocks = nn.ModuleList(Block(config, n) for n in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.embedding_dim, config.vocabulary_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        if config.positions == "rope":
            # Not part of the state: both are derived from the configuration.
            shape = (config.sequence_length, config.head_dim)
            self.register_buffer("rope_cosines", torch.empty(shape), persistent=False)
            self.register_buffer("rope_sines", torch.empty(shape), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all weights from torch's global random stream and fills the rotation tables."""
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                writes_residual = name.endswith(RESIDUAL_WRITERS)
                if not (name == "head" and self.config.tied):
                    nn.init.normal_(module.weight, std=residual_std if writes_residual else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.reset_parameters()
            elif isinstance(module, Experts):
                module.reset_parameters(0.02, residual_std)
        self._fill_rotations()

    def _fill_rotations(self) -> None:
        if self.config.positions != "rope":
            return
        pairs = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64)
        frequencies = self.config.rope_base ** (-pairs / self.config.head_dim)
        angles = torch.outer(
            torch.arange(self.config.sequence_length, dtype=torch.float64), frequencies
        ).repeat(1, 2)
        self.rope_cosines.copy_(angles.cos())
        self.rope_sines.copy_(angles.sin())

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        finish: Callable[[Tensor, nn.Module], Any] | None = None,
    ) -> Any:
        """Next-token logits at every position.

        Args:
            input_ids: integer [B, S], S at most `sequence_length`.
            position_ids: [B, S]; default: positions from 0.
            document_ids: [B, S]; if given, attention stays within a document. Padding at the end
                needs no mask: no earlier position attends to it.
            finish: computes the result from the last hidden states [B, S, D] and the output layer;
                default: the logits.

        Returns:
            [B, S, V], or the result of `finish`.

        Raises:
            ModelError: a shape is wrong.
        """
        hidden = self._hidden(input_ids, position_ids, document_ids)
        return self.head(hidden) if finish is None else finish(hidden, self.head)

    def _hidden(
        self, input_ids: Tensor, position_ids: Tensor | None, document_ids: Tensor | None
    ) -> Tensor:
        self._check_shapes(input_ids, position_ids, document_ids)
        length = input_ids.shape[1]
        hidden = self.token_embedding(input_ids)
        if self.config.positions == "learned":
            if position_ids is None:
                position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
            hidden = hidden + self.position_embedding(position_ids)
        rotation = self._rotation(length, position_ids)
        mask = None if document_ids is None else self.document_mask(document_ids)
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden, rotation, mask)
        out: Tensor = self.norm(hidden)
        return out

    def _rotation(self, length: int, position_ids: Tensor | None) -> Rotation | None:
        if self.config.positions != "rope":
            return None
        if position_ids is None:
            return self.rope_cosines[:length], self.rope_sines[:length]
        return (
            self.rope_cosines[position_ids].unsqueeze(1),
            self.rope_sines[position_ids].unsqueeze(1),
        )

    def _check_shapes(
        self, input_ids: Tensor, position_ids: Tensor | None, document_ids: Tensor | None
    ) -> None:
        if input_ids.dim() != 2 or not 1 <= input_ids.shape[1] <= self.config.sequence_length:
            raise ModelError(
                f"input_ids have shape {list(input_ids.shape)}",
                where="GPT.forward",
                rule=f"[batch, sequence], sequence from 1 to {self.config.sequence_length}",
                remedy="shorten the sequences, or build the model with a longer sequence_length",
            )
        for name, ids in (("position_ids", position_ids), ("document_ids", document_ids)):
            if ids is not None and ids.shape != input_ids.shape:
                raise ModelError(
                    f"{name} have shape {list(ids.shape)}",
                    where="GPT.forward",
                    rule=f"the shape of input_ids: {list(input_ids.shape)}",
                    remedy=f"give one of {name} for each token",
                )

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        num_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues sequences by sampling, in evaluation mode; modes are restored afterwards.

        Args:
            input_ids: [B, S], S at least 1; the last `sequence_length` tokens are used.
            num_new_tokens: number of tokens to add to each sequence.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: sample among the k most likely tokens; None for all.
            generator: random generator on the model's device; None for torch's global one.

        Returns:
            [B, S + num_new_tokens].

        Raises:
            ModelError: an argument is out of range.
        """
        if temperature < 0 or num_new_tokens < 0 or (top_k is not None and top_k < 1):
            raise ModelError(
                f"cannot generate with temperature={temperature}, top_k={top_k}, "
                f"num_new_tokens={num_new_tokens}",
                where="GPT.generate",
                rule="temperature >= 0, top_k >= 1, num_new_tokens >= 0",
            )
        with _evaluating(self):
            for _ in range(num_new_tokens):
                seen = input_ids[:, -self.config.sequence_length :]
                scores = self.head(self._hidden(seen, None, None)[:, -1]).float()
                following = _sample(scores, temperature, top_k, generator)
                input_ids = torch.cat((input_ids, following.to(input_ids.dtype)), dim=1)
        return input_ids


def _sample(
    scores: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token [B, 1] from logits [B, V]."""
    if temperature == 0:
        return scores.argmax(dim=-1, keepdim=True)
    candidates = scores / temperature
    if top_k is None:
        return torch.multinomial(candidates.softmax(dim=-1), 1, generator=generator)
    best = candidates.topk(min(top_k, candidates.shape[-1]), dim=-1)
    choice = torch.multinomial(best.values.softmax(dim=-1), 1, generator=generator)
    return best.indices.gather(-1, choice)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode; every submodule gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
