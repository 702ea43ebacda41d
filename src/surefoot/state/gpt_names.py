"""Our GPT under the names of GPT-2, Llama and nanoGPT: tensors renamed, split and transposed.

Changes names only, never values. A model that computes something else has no counterpart there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.models.gpt import GPTConfig

Tensors = Mapping[str, Tensor]
PROJECTIONS = ("query", "key", "value")
GPT2_LAYER = {
    "attn.c_proj": "attention.output",
    "mlp.c_fc": "feedforward.input",
    "mlp.c_proj": "feedforward.output",
}
GPT2_NORMS = {"ln_1": "attention_norm", "ln_2": "feedforward_norm"}
LLAMA_LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feedforward_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "feedforward.gate",
    "mlp.up_proj": "feedforward.input",
    "mlp.down_proj": "feedforward.output",
}


@dataclass(frozen=True)
class Renamed:
    """A model under the names of another library."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]


def style_of(config: GPTConfig) -> str | None:
    """`gpt2` or `llama` if one of them computes the same; else None."""
    if config.experts != "none":
        return None
    parts = (config.norm, config.activation, config.positions)
    if parts == ("layernorm", "gelu", "learned") and config.num_kv_heads == config.num_heads:
        return "gpt2"
    return "llama" if parts == ("rmsnorm", "swiglu", "rope") else None


def to_transformers(config: GPTConfig, weights: Tensors) -> Renamed | None:
    """Our weights under transformers' names, with the fields of `config.json`."""
    style = style_of(config)
    if style is None:
        return None
    return _to_gpt2(config, weights) if style == "gpt2" else _to_llama(config, weights)


def from_gpt2(tensors: Tensors, num_layers: int, *, turned: bool) -> dict[str, Tensor]:
    """Our names for those of GPT-2 and nanoGPT.

    Args:
        tensors: under their names, without `transformer.`.
        turned: whether matrices are stored as [in, out], as in GPT-2 but not in nanoGPT.

    Raises:
        KeyError: one is missing.
    """
    ours = {
        "token_embedding.weight": tensors["wte.weight"],
        "position_embedding.weight": tensors["wpe.weight"],
        "head.weight": tensors.get("lm_head.weight", tensors["wte.weight"]),
    }
    kinds = [kind for kind in ("weight", "bias") if f"ln_f.{kind}" in tensors]
    for kind in kinds:
        ours[f"norm.{kind}"] = tensors[f"ln_f.{kind}"]
    for layer in range(num_layers):
        for kind in kinds:
            for theirs, name in GPT2_NORMS.items():
                ours[f"blocks.{layer}.{name}.{kind}"] = tensors[f"h.{layer}.{theirs}.{kind}"]
            for theirs, name in GPT2_LAYER.items():
                tensor = tensors[f"h.{layer}.{theirs}.{kind}"]
                ours[f"blocks.{layer}.{name}.{kind}"] = _turn(tensor) if turned else tensor
            joint = tensors[f"h.{layer}.attn.c_attn.{kind}"]
            joint = _turn(joint) if turned else joint
            for name, part in zip(PROJECTIONS, joint.chunk(3), strict=True):
                ours[f"blocks.{layer}.attention.{name}.{kind}"] = part
    return ours


def from_llama(tensors: Tensors, num_layers: int) -> dict[str, Tensor]:
    """Our names for those of Llama, given without `model.`.

    Raises:
        KeyError: one is missing.
    """
    embedding = tensors["embed_tokens.weight"]
    ours = {
        "token_embedding.weight": embedding,
        "norm.weight": tensors["norm.weight"],
        "head.weight": tensors.get("lm_head.weight", embedding),
    }
    for layer in range(num_layers):
        for theirs, name in LLAMA_LAYER.items():
            for kind in ("weight", "bias"):
                there = f"layers.{layer}.{theirs}.{kind}"
                if kind == "weight" or there in tensors:
                    ours[f"blocks.{layer}.{name}.{kind}"] = tensors[there]
    return ours


def _to_gpt2(config: GPTConfig, weights: Tensors) -> Renamed:
    def get(name: str) -> Tensor:
        # A model without biases is equivalent to one with zero biases.
        if name in weights or name.endswith("weight"):
            return weights[name]
        twin = weights[name.removesuffix("bias") + "weight"]
        return torch.zeros(twin.shape[0], dtype=twin.dtype)

    made = {
        "transformer.wte.weight": weights["token_embedding.weight"],
        "transformer.wpe.weight": weights["position_embedding.weight"],
        "transformer.ln_f.weight": get("norm.weight"),
        "transformer.ln_f.bias": get("norm.bias"),
    }
    if not config.tied:
        made["lm_head.weight"] = weights["head.weight"]
    for layer in range(config.num_layers):
        there, here = f"transformer.h.{layer}", f"blocks.{layer}"
        for kind in ("weight", "bias"):
            for theirs, name in GPT2_NORMS.items():
                made[f"{there}.{theirs}.{kind}"] = get(f"{here}.{name}.{kind}")
            for theirs, name in GPT2_LAYER.items():
                made[f"{there}.{theirs}.{kind}"] = _turn(get(f"{here}.{name}.{kind}"))
            parts = [get(f"{here}.attention.{name}.{kind}") for name in PROJECTIONS]
            made[f"{there}.attn.c_attn.{kind}"] = _turn(torch.cat(parts))
    fields = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocabulary_size,
        "n_positions": config.sequence_length,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.embedding_dim,
        "n_inner": config.feedforward_dim,
        # The exact GELU; `gelu_new` is an approximation.
        "activation_function": "gelu",
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }
    return Renamed(made, fields)


def _to_llama(config: GPTConfig, weights: Tensors) -> Renamed:
    made = {
        "model.embed_tokens.weight": weights["token_embedding.weight"],
        "model.norm.weight": weights["norm.weight"],
    }
    if not config.tied:
        made["lm_head.weight"] = weights["head.weight"]
    for layer in range(config.num_layers):
        for theirs, name in LLAMA_LAYER.items():
            for kind in ("weight", "bias"):
                here = f"blocks.{layer}.{name}.{kind}"
                if here in weights:
                    made[f"model.layers.{layer}.{theirs}.{kind}"] = weights[here]
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocabulary_size,
        "max_position_embeddings": config.sequence_length,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_size": config.embedding_dim,
        "intermediate_size": config.feedforward_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
    }
    return Renamed(made, fields)


def _turn(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous() if tensor.dim() == 2 else tensor
