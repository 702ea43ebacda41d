"""Recognizes a foreign checkpoint: where the weights are, which model it is, what is left out.

Works on plain values and tensors already read. Changes names, never values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from surefoot.state.gpt_names import from_gpt2, from_llama

WRAPPER_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.")
"""Prefixes that only wrappers add, anywhere in a name."""
PARALLEL_PREFIX = "module."
"""Prefix of a parallel wrapper around the model, which people also use themselves."""
CONTAINERS = ("state_dict", "model_state_dict", "model", "module", "params", "weights")


@dataclass
class Found:
    """Weights by name, and facts about their source."""

    kind: str
    weights: dict[str, Tensor]
    left_out: list[str] = field(default_factory=list)
    """Content of the file that is not part of the weights; always reported."""
    notes: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    """The model section of a recipe, if it is one of our models."""


def find_weights(content: Any) -> Found:
    """The weights in the content of a file.

    Raises:
        ValueError: there are none.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict of tensors")
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return Found("state dict", _named(content))
    for name in CONTAINERS:
        inner = content.get(name)
        if isinstance(inner, Mapping) and any(isinstance(v, Tensor) for v in inner.values()):
            kind = "training checkpoint"
            if "pytorch-lightning_version" in content:
                kind = "Lightning checkpoint"
            elif {"model_args", "iter_num"} <= content.keys():
                kind = "nanoGPT checkpoint"
            tensors = {k: v for k, v in inner.items() if isinstance(v, Tensor)}
            left = [str(key) for key in content if key != name]
            left += [f"{name}.{key}" for key in inner if key not in tensors]
            found = Found(kind, _named(tensors), left)
            if kind == "nanoGPT checkpoint" and isinstance(content["model_args"], Mapping):
                _as_nanogpt(found, content["model_args"])
            return found
    keys = ", ".join(sorted(map(str, content))[:8])
    raise ValueError(f"no weights were found; the keys are: {keys or 'none'}")


def without_wrappers(found: Found) -> None:
    """Removes prefixes of wrappers from the names, and that of a LightningModule's only model.

    A prefix that people may have chosen is removed from all names or from none.

    Raises:
        ValueError: two tensors would have the same name.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in found.weights.items():
        bare = name
        for wrapper in WRAPPER_PREFIXES:
            bare = bare.replace(wrapper, "")
        if bare in renamed:
            raise ValueError(f"two tensors would be named {bare!r}")
        renamed[bare] = tensor
    while renamed and all(
        name.startswith(PARALLEL_PREFIX) and name != PARALLEL_PREFIX for name in renamed
    ):
        renamed = _without(renamed, PARALLEL_PREFIX)
    if any(name.startswith(PARALLEL_PREFIX) for name in renamed):
        found.notes.append(f"names keep the prefix '{PARALLEL_PREFIX}', since others lack it")
    first = {name.partition(".")[0] for name in renamed}
    if found.kind == "Lightning checkpoint" and len(first) == 1 and all("." in n for n in renamed):
        (prefix,) = first
        renamed = {name.partition(".")[2]: tensor for name, tensor in renamed.items()}
        found.notes.append(f"the prefix '{prefix}.' of the LightningModule was removed")
    if renamed.keys() != found.weights.keys():
        found.notes.append("prefixes of wrappers were removed from the names")
    found.weights = renamed


def as_our_gpt(found: Found, config: Mapping[str, Any]) -> None:
    """Renames GPT-2 and Llama weights to our decoder, if it computes the same.

    Args:
        config: the fields of `config.json`.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        _as_gpt2(found, config)
    elif kind == "llama":
        _as_llama(found, config)
    elif kind is not None:
        found.notes.append(f"'{kind}' is not one of our models: names are unchanged")


def _as_nanogpt(found: Found, arguments: Mapping[str, Any]) -> None:
    tensors = _without(_unwrapped(found.weights), "transformer.")
    found.weights = from_gpt2(tensors, int(arguments["n_layer"]), turned=False)
    found.model = _gpt2_section(
        tensors,
        int(arguments["n_layer"]),
        int(arguments["n_head"]),
        bias="ln_f.bias" in tensors,
        epsilon=1e-5,
        tied=True,
    )


def _as_gpt2(found: Found, config: Mapping[str, Any]) -> None:
    tensors = _without(found.weights, "transformer.")
    # Old files contain the causal mask as a buffer, which is not a weight.
    masks = [n for n in tensors if n.endswith(("attn.bias", "attn.masked_bias")) and "c_" not in n]
    layers = int(config["n_layer"])
    ours = from_gpt2(tensors, layers, turned=True)
    found.left_out += masks
    found.model = _gpt2_section(
        tensors,
        layers,
        int(config["n_head"]),
        bias=True,
        epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        tied="lm_head.weight" not in tensors or bool(config.get("tie_word_embeddings", True)),
    )
    found.weights = ours
    if config.get("activation_function", "gelu_new") != "gelu":
        found.notes.append(
            "its GELU is the approximation by tanh, ours is exact: outputs differ by about 1e-3"
        )


def _gpt2_section(
    tensors: Mapping[str, Tensor],
    layers: int,
    heads: int,
    *,
    bias: bool,
    epsilon: float,
    tied: bool,
) -> dict[str, Any]:
    vocabulary, width = tensors["wte.weight"].shape
    forward = tensors["h.0.mlp.c_fc.weight"].numel() // width
    return {
        "kind": "gpt",
        "vocabulary_size": vocabulary,
        "sequence_length": tensors["wpe.weight"].shape[0],
        "num_layers": layers,
        "num_heads": heads,
        "embedding_dim": width,
        "feedforward_dim": forward,
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "tied": tied,
        "bias": bias,
        "norm_epsilon": epsilon,
    }


def _as_llama(found: Found, config: Mapping[str, Any]) -> None:
    tensors = _without(found.weights, "model.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    odd = {
        "scaled rotary positions": rope.get("rope_type", rope.get("type", "default")) != "default",
        "heads of another width": config.get("head_dim") not in (None, width // heads),
        "biases in one part only": attention_bias != mlp_bias,
        f"the activation {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
    }
    if any(odd.values()):
        which = ", ".join(name for name, is_there in odd.items() if is_there)
        found.notes.append(f"it has {which}, which our decoder lacks: names are unchanged")
        return
    layers = int(config["num_hidden_layers"])
    found.weights = from_llama(tensors, layers)
    found.model = {
        "kind": "gpt",
        "vocabulary_size": tensors["embed_tokens.weight"].shape[0],
        "sequence_length": int(config["max_position_embeddings"]),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "embedding_dim": width,
        "feedforward_dim": int(config["intermediate_size"]),
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "tied": "lm_head.weight" not in tensors,
        "bias": attention_bias,
        "norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rope_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
    }


def _named(tensors: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    odd = [name for name in tensors if not isinstance(name, str) or not name.isprintable()]
    if odd or "" in tensors:
        raise ValueError(f"a tensor is named {odd[0] if odd else ''!r}")
    return dict(tensors)


def _unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}


def _without(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
