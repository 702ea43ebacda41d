"""Weights that leave and come back: equal numbers, other names; what stays behind is said."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surefoot.core.errors import CheckpointError, MissingDataError, RequestError
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.optim.ema import NoAverage, WeightEma
from surefoot.state.checkpoint import read_checkpoint, write_checkpoint
from surefoot.state.commit import Draft, commit
from surefoot.state.foreign import Imported, import_weights
from surefoot.state.interop import export_weights
from surefoot.state.recognition import Found, without_wrappers
from surefoot.state.run_state import averaged_weights_of
from surefoot.state.shards import Box, Piece
from surefoot.state.tree import split_tree
from surefoot.state.weights import start_from

SHAPE: dict[str, int] = {
    "vocabulary_size": 31,
    "sequence_length": 12,
    "num_layers": 2,
    "num_heads": 4,
    "embedding_dim": 16,
}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SHAPE),
    "gpt2 without bias, untied": GPTConfig.gpt2(**SHAPE, bias=False, tied=False),
    "llama": GPTConfig.llama(**SHAPE, num_kv_heads=2),
    "llama with bias, tied": GPTConfig.llama(**SHAPE, num_kv_heads=4, bias=True, tied=True),
}
MIXED = GPTConfig(**SHAPE, num_kv_heads=2, feedforward_dim=32, norm="layernorm")
TENSORS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.ones(2)}


def random_gpt(config: GPTConfig) -> GPT:
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def saved(folder: Path, model: nn.Module, config: GPTConfig | None) -> Path:
    fields = None
    if config is not None:
        fields = {"kind": "gpt", **{n: getattr(config, n) for n in config.__dataclass_fields__}}
    state = split_tree({"model": model.state_dict(), "progress": {"step": 7}})
    return write_checkpoint(folder / "checkpoints", 7, state, {"architecture": fields, "data": {}})


def logits_of_theirs(folder: Path, ids: Tensor) -> Tensor:
    transformers = pytest.importorskip("transformers")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        return theirs.eval()(ids).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_transformers_folder_gives_the_same_outputs_and_comes_back(
    name: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    model = random_gpt(config)
    made = export_weights(saved(tmp_path, model, config), tmp_path / "out")
    assert made.format == "transformers" and made.step == 7
    ids = torch.randint(0, 31, (3, 12))
    with torch.no_grad():
        ours = model(ids)
    torch.testing.assert_close(ours, logits_of_theirs(tmp_path / "out", ids), rtol=1e-4, atol=1e-4)
    back = import_weights(tmp_path / "out", tmp_path / "back.safetensors")
    fields = {n: v for n, v in back.model.items() if n != "kind"}
    again = GPT(GPTConfig(**{"num_kv_heads": config.num_heads, **fields})).eval()
    start_from(again, back.weights)
    with torch.no_grad():
        assert again(ids).equal(ours)
    assert not back.notes


def test_a_model_without_a_twin_is_exported_as_it_is_and_says_so(tmp_path: Path) -> None:
    model = random_gpt(MIXED)
    checkpoint = saved(tmp_path, model, MIXED)
    with pytest.raises(RequestError, match="no model that computes"):
        export_weights(checkpoint, tmp_path / "no", "transformers")
    assert not (tmp_path / "no").exists()
    made = export_weights(checkpoint, tmp_path / "out")
    assert made.format == "safetensors" and "transformers has no model" in made.note
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in model.state_dict().items())
    sums = (tmp_path / "out" / "SHA256SUMS").read_text()
    assert sums.endswith("  model.safetensors\n")


def test_a_plain_state_dict(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    made = export_weights(saved(tmp_path, model, None), tmp_path / "out", "pt")
    assert made.format == "pt"
    found = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert found.keys() == model.state_dict().keys()
    assert all(found[name].equal(tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(RequestError, match="already exists"):
        export_weights(tmp_path, tmp_path / "out")
    with pytest.raises(MissingDataError):
        export_weights(tmp_path / "out", tmp_path / "more")


def test_the_average_of_the_weights_leaves_too(tmp_path: Path) -> None:
    model = random_gpt(GPTConfig.gpt2(**SHAPE))  # Tied: one tensor of two names.
    ema = WeightEma(model, decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.update(lambda: torch.tensor(True))
    parts = {"model": model.state_dict(), "progress": {"step": 7}}
    about = {"architecture": None, "data": {}}
    for name, average in (("with", ema), ("without", NoAverage())):
        state = split_tree({**parts, "average": average.state_dict()})
        write_checkpoint(tmp_path / name / "checkpoints", 7, state, about)
    made = export_weights(tmp_path / "with", tmp_path / "out", which="ema")
    assert made.weights == "ema"
    found = load_file(tmp_path / "out" / "model.safetensors")
    with ema.swapped(model):
        assert found.keys() == model.state_dict().keys()
        assert all(found[name].equal(tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(RequestError, match="kept no average"):
        export_weights(tmp_path / "without", tmp_path / "no", which="ema")


class Counting(nn.Linear):
    """A layer with an extra state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_leaves_where_the_format_can_hold_it(tmp_path: Path) -> None:
    model = Counting(2, 2)
    checkpoint = saved(tmp_path, model, None)
    export_weights(checkpoint, tmp_path / "pt", "pt")
    found = torch.load(tmp_path / "pt" / "model.pt", weights_only=True)
    assert list(found) == list(model.state_dict()) and found["_extra_state"] == {"calls": 3}
    made = export_weights(checkpoint, tmp_path / "safe", "safetensors")
    assert "left out: _extra_state" in made.note and made.tensors == 2
    assert sorted(load_file(tmp_path / "safe" / "model.safetensors")) == ["bias", "weight"]
    with pytest.raises(CheckpointError, match="another model"):
        start_from(model, tmp_path / "safe" / "model.safetensors")


def test_the_average_of_a_tied_tensor_is_that_of_all_its_names_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Where it was written in parts, each name is read into memory of its own."""
    model = nn.ModuleDict({"a": nn.Linear(2, 4, bias=False), "b": Counting(2, 4, bias=False)})
    model["b"].weight = model["a"].weight
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    model.register_buffer("none", torch.zeros(0, 3))
    ema = WeightEma(model, decay=0.5)
    with torch.no_grad():
        model["a"].weight.add_(1.0)
    ema.update(lambda: torch.tensor(True))
    state = split_tree({"model": model.state_dict(), "average": ema.state_dict()})
    pieces = []
    for name, whole in state.tensors.items():
        shape = tuple(whole.shape)
        halves = [(at, slice(at, at + 2)) for at in (0, 2)] if len(shape) == 2 and shape[0] else []
        pieces += [Piece(name, shape, Box((at, 0), (2, 2)), whole[rows]) for at, rows in halves]
        if not halves:
            pieces.append(Piece(name, shape, Box.whole(shape), whole))
    checkpoint = commit(tmp_path, Draft(1, pieces, state.values, {}))
    means = averaged_weights_of(read_checkpoint(checkpoint)[1])
    with ema.swapped(model):
        for name, expected in model.state_dict().items():
            same = means[name].equal(expected) if isinstance(expected, Tensor) else None
            assert same or means[name] == expected, name


def test_weights_start_only_names_that_are_one_tensor(tmp_path: Path) -> None:
    """A transposed view begins where the weight does and has its shape, and is another tensor."""
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("turned", model.weight.detach().T)
    save_file({"weight": torch.eye(2)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="another model") as caught:
        start_from(model, tmp_path / "w.safetensors")
    assert "turned: checkpoint missing" in caught.value.where


def brought(source: Path, tmp_path: Path) -> tuple[Imported, dict[str, Tensor]]:
    made = import_weights(source, tmp_path / "came.safetensors")
    return made, load_file(made.weights)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("old", [False, True])
def test_a_state_dict_of_torch(tmp_path: Path, old: bool) -> None:
    path = tmp_path / "weights.pt"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=not old)
    made, found = brought(path, tmp_path)
    assert made.kind == "state dict" and made.left_out == ()
    assert_equal(found, TENSORS)


def test_a_training_checkpoint_leaves_the_rest_behind_and_says_it(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in TENSORS.items()}
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict()
    torch.save({"model": wrapped, "optimizer": optimizer, "epoch": 3}, path)
    made, found = brought(path, tmp_path)
    assert made.kind == "training checkpoint" and set(made.left_out) == {"optimizer", "epoch"}
    assert "prefixes of wrappers" in made.notes[0]
    assert_equal(found, TENSORS)


@pytest.mark.parametrize(
    ("names", "found", "note"),
    [
        (["module.a", "module.b.c"], ["a", "b.c"], "prefixes of wrappers were removed"),
        (["module.module.a", "module.b"], ["module.a", "b"], "keep the prefix 'module.'"),
        (["module.a", "head.b"], ["module.a", "head.b"], "keep the prefix 'module.'"),
        (
            ["_orig_mod.module.a", "module._orig_mod.b"],
            ["a", "b"],
            "prefixes of wrappers were removed",
        ),
        (["_orig_mod.module.a", "head.b"], ["module.a", "head.b"], "keep the prefix 'module.'"),
        (["a", "module.a"], ["a", "module.a"], "keep the prefix 'module.'"),
        (["a.module.b", "c"], ["a.module.b", "c"], ""),
        (["module.", "module.a"], ["module.", "module.a"], "keep the prefix 'module.'"),
    ],
)
def test_a_name_that_people_give_too_is_taken_off_all_or_none(
    names: list[str], found: list[str], note: str
) -> None:
    state = Found("state dict", {name: torch.ones(1) for name in names})
    without_wrappers(state)
    assert list(state.weights) == found
    assert note in " ".join(state.notes) and bool(state.notes) == bool(note)


def test_an_attribute_of_the_name_of_a_wrapper_comes_over(tmp_path: Path) -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    trained, fresh = Headed(), Headed()
    state = Found("state dict", nn.DataParallel(trained).state_dict())
    without_wrappers(state)
    save_file(state.weights, tmp_path / "weights.safetensors")
    start_from(fresh, tmp_path / "weights.safetensors")
    assert_equal(fresh.state_dict(), trained.state_dict())


def test_a_lightning_checkpoint_with_objects_in_its_hyper_parameters(tmp_path: Path) -> None:
    path = tmp_path / "epoch=1.ckpt"
    content = {
        "epoch": 1,
        "global_step": 10,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"net.{name}": tensor for name, tensor in TENSORS.items()},
        "hyper_parameters": argparse.Namespace(lr=1e-3, path=Path("data")),
        "optimizer_states": [{}],
    }
    torch.save(content, path)
    made, found = brought(path, tmp_path)
    assert made.kind == "Lightning checkpoint"
    assert {"hyper_parameters", "optimizer_states"} <= set(made.left_out)
    assert "prefix 'net.'" in made.notes[0]
    assert_equal(found, TENSORS)


@pytest.mark.parametrize("bias", [True, False])
def test_a_nanogpt_checkpoint_becomes_our_gpt(tmp_path: Path, bias: bool) -> None:
    config = GPTConfig.gpt2(**SHAPE, bias=bias)
    model = random_gpt(config)
    ours = model.state_dict()
    theirs = {
        "wte.weight": ours["token_embedding.weight"],
        "wpe.weight": ours["position_embedding.weight"],
    }
    for kind in ("weight", "bias") if bias else ("weight",):
        theirs[f"ln_f.{kind}"] = ours[f"norm.{kind}"]
        for n in range(2):
            here, there = f"blocks.{n}", f"h.{n}"
            names = ("query", "key", "value")
            parts = [ours[f"{here}.attention.{name}.{kind}"] for name in names]
            # Unlike GPT-2, nanoGPT keeps matrices as torch does.
            theirs[f"{there}.attn.c_attn.{kind}"] = torch.cat(parts)
            theirs[f"{there}.attn.c_proj.{kind}"] = ours[f"{here}.attention.output.{kind}"]
            theirs[f"{there}.mlp.c_fc.{kind}"] = ours[f"{here}.feedforward.input.{kind}"]
            theirs[f"{there}.mlp.c_proj.{kind}"] = ours[f"{here}.feedforward.output.{kind}"]
            theirs[f"{there}.ln_1.{kind}"] = ours[f"{here}.attention_norm.{kind}"]
            theirs[f"{there}.ln_2.{kind}"] = ours[f"{here}.feedforward_norm.{kind}"]
    state = {f"_orig_mod.transformer.{name}": tensor for name, tensor in theirs.items()}
    state["_orig_mod.lm_head.weight"] = ours["head.weight"]
    arguments = {"n_layer": 2, "n_head": 4, "n_embd": 16, "bias": bias, "vocab_size": 31}
    path = tmp_path / "ckpt.pt"
    torch.save({"model": state, "model_args": arguments, "iter_num": 5, "config": {}}, path)
    made = import_weights(path, tmp_path / "came.safetensors")
    assert made.kind == "nanoGPT checkpoint" and set(made.left_out) >= {"model_args", "iter_num"}
    fields: dict[str, Any] = {n: v for n, v in made.model.items() if n != "kind"}
    again = GPT(GPTConfig(num_kv_heads=4, **fields)).eval()
    start_from(again, made.weights)
    ids = torch.randint(0, 31, (2, 12))
    with torch.no_grad():
        assert again(ids).equal(model(ids))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    state = {"model": dict(TENSORS), "optim": {"m": torch.zeros(4)}, "step": 3}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    made, found = brought(folder, tmp_path)
    assert made.kind == "distributed checkpoint" and set(made.left_out) == {"step", "optim.m"}
    assert_equal(found, TENSORS)


def test_shards_with_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensor}, folder / shard)
        weight_map[name] = shard
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for source in (index, folder):
        made = import_weights(source, tmp_path / f"{source.name}.safetensors")
        assert_equal(load_file(made.weights), TENSORS)
    (folder / "model-00000-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        import_weights(folder, tmp_path / "no.safetensors")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".import")] == []


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    with pytest.raises(MissingDataError):
        import_weights(tmp_path / "b", tmp_path / "c.safetensors")
    with pytest.raises(RequestError, match="already exists"):
        import_weights(tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    torch.save({"optimizer": 1}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="the keys are: optimizer"):
        import_weights(tmp_path / "c.pt", tmp_path / "d.safetensors")
