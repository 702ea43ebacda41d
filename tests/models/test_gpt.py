"""The decoder: what it computes, what it can see, how it starts and how it continues a text."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from surefoot.core.errors import ModelError
from surefoot.models.gpt import GPT, GPTConfig

SHAPE = {
    "vocabulary_size": 31,
    "sequence_length": 12,
    "num_layers": 2,
    "num_heads": 4,
    "embedding_dim": 16,
}


def gpt2(**changes) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig.gpt2(**(SHAPE | changes)))


def llama(**changes) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig.llama(**(SHAPE | {"num_kv_heads": 2} | changes)))


styles = pytest.mark.parametrize("build", [gpt2, llama])


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(1))


def randomised(model: GPT) -> GPT:
    """All weights drawn wide, so that no bias, norm or position is without effect."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter + 0.3 * noise)
    return model


def test_gpt2_style_equals_the_published_model():
    transformers = pytest.importorskip("transformers")
    ours = randomised(gpt2().double()).eval()
    config = transformers.GPT2Config(
        vocab_size=31,
        n_positions=12,
        n_layer=2,
        n_head=4,
        n_embd=16,
        activation_function="gelu",
        attn_implementation="sdpa",
    )
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    source = ours.state_dict()
    target = theirs.transformer.state_dict()
    target["wte.weight"] = source["token_embedding.weight"]
    target["wpe.weight"] = source["position_embedding.weight"]
    target["ln_f.weight"], target["ln_f.bias"] = source["norm.weight"], source["norm.bias"]
    for n in range(2):
        for kind in ("weight", "bias"):
            target[f"h.{n}.ln_1.{kind}"] = source[f"blocks.{n}.attention_norm.{kind}"]
            target[f"h.{n}.ln_2.{kind}"] = source[f"blocks.{n}.feedforward_norm.{kind}"]
            parts = [source[f"blocks.{n}.attention.{p}.{kind}"] for p in ("query", "key", "value")]
            # GPT-2 stores its matrices as [in, out].
            target[f"h.{n}.attn.c_attn.{kind}"] = turned(torch.cat(parts))
            for theirs_name, ours_name in (
                ("attn.c_proj", "attention.output"),
                ("mlp.c_fc", "feedforward.input"),
                ("mlp.c_proj", "feedforward.output"),
            ):
                target[f"h.{n}.{theirs_name}.{kind}"] = turned(
                    source[f"blocks.{n}.{ours_name}.{kind}"]
                )
    theirs.transformer.load_state_dict(target)
    ids = tokens(3, 12)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-10, atol=1e-10)


def turned(weight: torch.Tensor) -> torch.Tensor:
    return weight.mT if weight.dim() == 2 else weight


def test_llama_style_equals_the_published_model():
    transformers = pytest.importorskip("transformers")
    ours = randomised(llama().double()).eval()
    config = transformers.LlamaConfig(
        vocab_size=31,
        max_position_embeddings=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=16,
        intermediate_size=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    source = ours.state_dict()
    target = {
        "model.embed_tokens.weight": source["token_embedding.weight"],
        "model.norm.weight": source["norm.weight"],
        "lm_head.weight": source["head.weight"],
    }
    names = {
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
    for n in range(2):
        for theirs_name, ours_name in names.items():
            target[f"model.layers.{n}.{theirs_name}.weight"] = source[
                f"blocks.{n}.{ours_name}.weight"
            ]
    theirs.load_state_dict(target)
    ids = tokens(3, 12)
    # Their rotation angles are float32 whatever the weights are.
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


@styles
def test_logits_have_one_row_a_place(build):
    assert build()(tokens(3, 7)).shape == (3, 7, 31)


@styles
def test_shapes_on_the_way(build):
    model, shapes = build(), []
    for part in (model.token_embedding, model.blocks[0], model.blocks[1], model.norm):
        part.register_forward_hook(lambda module, inputs, output: shapes.append(list(output.shape)))
    model(tokens(3, 7))
    assert shapes == [[3, 7, 16]] * 4


@styles
def test_no_place_sees_what_comes_after_it(build):
    model = randomised(build())
    ids = tokens(2, 12)
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 31
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@styles
def test_a_document_equals_itself_alone(build):
    model = randomised(build().double())
    ids = tokens(1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = model(ids, position_ids=positions, document_ids=documents)
    alone = torch.cat((model(ids[:, :5]), model(ids[:, 5:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(ids)[:, 5:], alone[:, 5:])


@styles
def test_position_ids_move_places(build):
    model = randomised(build().double())
    ids = tokens(1, 6)
    reversed_places = torch.arange(5, -1, -1).unsqueeze(0)
    given = model(ids, position_ids=torch.arange(6).unsqueeze(0))
    assert torch.equal(given, model(ids))
    assert not torch.allclose(model(ids, position_ids=reversed_places), given)


def test_rotary_scores_depend_on_distance_only():
    model = randomised(llama(num_layers=1).double())
    ids = tokens(1, 5)
    shifted = torch.arange(5).unsqueeze(0) + 7
    # The tables of sines are float32.
    torch.testing.assert_close(model(ids, position_ids=shifted), model(ids), rtol=1e-5, atol=1e-6)


def test_grouped_heads_equal_repeated_ones():
    grouped = randomised(llama().double())
    full = llama(num_kv_heads=4).double()
    state = grouped.state_dict()
    for name, value in state.items():
        if ".key." in name or ".value." in name:
            state[name] = value.view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    full.load_state_dict(state)
    ids = tokens(2, 9)
    torch.testing.assert_close(grouped(ids), full(ids), rtol=1e-12, atol=1e-12)


@styles
def test_gradients_are_those_of_the_function(build):
    model = randomised(build(num_layers=1, embedding_dim=8, vocabulary_size=5).double())
    ids = tokens(2, 4) % 5
    names, values = zip(*model.named_parameters(), strict=True)
    values = tuple(value.detach().clone().requires_grad_() for value in values)

    def scores(*given):
        return functional_call(model, dict(zip(names, given, strict=True)), (ids,))

    assert torch.autograd.gradcheck(scores, values, fast_mode=True)


@styles
def test_starts_as_published(build):
    model = build(vocabulary_size=4096, embedding_dim=128, num_layers=8, num_heads=4)
    block = model.blocks[3]
    residual = 0.02 / math.sqrt(16)
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.attention.output.weight.std().item() == pytest.approx(residual, rel=0.03)
    assert block.feedforward.output.weight.std().item() == pytest.approx(residual, rel=0.03)
    assert all((p == 0).all() for n, p in model.named_parameters() if n.endswith("bias"))
    assert all((p == 1).all() for n, p in model.named_parameters() if "norm.weight" in n)
    ids = torch.randint(0, 4096, (2, 12))
    loss = F.cross_entropy(model(ids).flatten(0, 1), torch.randint(0, 4096, (24,)))
    assert loss.item() == pytest.approx(math.log(4096), abs=0.2)


@styles
def test_reset_draws_the_same_weights_from_the_same_seed(build):
    model, other = build(), build(tied=False)
    torch.manual_seed(5)
    model.reset_parameters()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    model.reset_parameters()
    assert all(torch.equal(first[name], value) for name, value in model.state_dict().items())
    assert other.head.weight is not other.token_embedding.weight


def test_weights_can_be_drawn_after_meta():
    with torch.device("meta"):
        model = llama()
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    expected = llama()
    torch.manual_seed(3)
    expected.reset_parameters()
    assert torch.equal(model(tokens(1, 12)), expected(tokens(1, 12)))


def test_tied_head_is_the_embedding():
    model = gpt2()
    assert model.head.weight is model.token_embedding.weight
    assert not any(name.startswith("rope") for name in llama().state_dict())


def test_usual_values():
    config = GPTConfig.gpt2(**SHAPE)
    assert (config.feedforward_dim, config.num_kv_heads, config.tied, config.bias) == (
        64,
        4,
        True,
        True,
    )
    config = GPTConfig.llama(**SHAPE, num_kv_heads=2, rope_base=5e5)
    assert (config.feedforward_dim, config.rope_base, config.tied, config.bias) == (
        64,
        5e5,
        False,
        False,
    )
    assert (
        GPTConfig.llama(**(SHAPE | {"embedding_dim": 4096}), num_kv_heads=2).feedforward_dim
        == 10944
    )


def test_the_plain_configuration_is_modern():
    config = GPTConfig(**SHAPE, num_kv_heads=2, feedforward_dim=32)
    assert (config.norm, config.activation, config.positions) == ("rmsnorm", "swiglu", "rope")
    assert (config.tied, config.bias, config.dropout) == (True, False, 0.0)


def test_parameters_of_gpt2_small():
    with torch.device("meta"):
        model = GPT(
            GPTConfig.gpt2(
                vocabulary_size=50257,
                sequence_length=1024,
                num_layers=12,
                num_heads=12,
                embedding_dim=768,
            )
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


@styles
def test_dropout_acts_in_training_only(build):
    model, plain = build(dropout=0.5), build()
    ids = tokens(1, 12)
    assert not torch.equal(model(ids), model(ids))
    assert torch.equal(model.eval()(ids), plain.eval()(ids))


@styles
def test_scores_are_half_precision_under_autocast(build):
    with torch.autocast("cpu", torch.bfloat16):
        assert build()(tokens(1, 12)).dtype == torch.bfloat16


# Dynamo looks at .grad of every tensor that enters a compiled block.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@styles
def test_compiles_without_a_break(build):
    model = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = tokens(2, 12)
    assert torch.equal(compiled(ids), model(ids))
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    assert torch.equal(model(ids, document_ids=ids // 16), build()(ids, document_ids=ids // 16))
    torch.compiler.reset()


@styles
def test_learns_a_short_text(build):
    model = build()
    ids = tokens(4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3


@styles
def test_greedy_continuation_takes_the_best_token(build):
    model = randomised(build())
    ids = tokens(2, 3)
    expected = ids
    for _ in range(12):
        best = model(expected[:, -12:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, best), dim=1)
    assert torch.equal(model.generate(ids, 12, temperature=0), expected)
    assert torch.equal(model.generate(ids, 12, top_k=1), expected)


def test_sampling_follows_its_own_generator():
    model = gpt2()
    ids = tokens(2, 3)
    state = torch.get_rng_state()
    first = model.generate(ids, 8, generator=torch.Generator().manual_seed(4))
    again = model.generate(ids, 8, top_k=31, generator=torch.Generator().manual_seed(4))
    other = model.generate(ids, 8, generator=torch.Generator().manual_seed(5))
    usual = model.generate(ids, 8, temperature=1.0, generator=torch.Generator().manual_seed(4))
    assert torch.equal(first, usual)
    assert torch.equal(model.generate(ids, 0), ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == again.shape == (2, 11)
    assert not torch.equal(first, other)
    assert torch.equal(first[:, :3], ids)


def test_temperature_sharpens():
    model = randomised(gpt2())
    ids = tokens(1, 3).expand(64, 3)
    greedy = model.generate(ids, 1, temperature=0)
    cold = model.generate(ids, 1, temperature=1e-4)
    warm = model.generate(ids, 1, temperature=1e4)
    assert torch.equal(cold, greedy)
    assert torch.equal(model.generate(ids, 1, temperature=1e-4, top_k=5), greedy)
    assert len(warm[:, -1].unique()) > 15


def test_top_k_keeps_to_the_best():
    model = randomised(gpt2())
    ids = tokens(1, 3).expand(64, 3)
    best = model(ids[:1])[0, -1].topk(3).indices
    drawn = model.generate(ids, 1, temperature=50.0, top_k=3)[:, -1].unique()
    assert set(drawn.tolist()) == set(best.tolist())


def test_generation_is_without_dropout():
    model, plain = gpt2(dropout=0.5), gpt2()
    ids = tokens(1, 3)
    assert torch.equal(model.generate(ids, 9, temperature=0), plain.generate(ids, 9, temperature=0))


def test_generation_leaves_modes_as_they_were():
    model = gpt2(dropout=0.1)
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    model.generate(tokens(1, 2), 2)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[99]]), 1)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_heads": 3}, "num_heads = 3 does not divide embedding_dim = 16"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ({"num_layers": 0}, "num_layers = 0"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"num_heads": 16, "num_kv_heads": 16}, "even head_dim"),
    ],
)
def test_impossible_shapes_are_refused(changes, named):
    with pytest.raises(ModelError, match=named):
        GPTConfig.llama(**(SHAPE | {"num_kv_heads": 2} | changes))


def test_wrong_batches_are_refused():
    model = gpt2()
    with pytest.raises(ModelError, match=r"shape \[2, 13\]") as caught:
        model(tokens(2, 13))
    assert "1 to 12" in caught.value.rule
    with pytest.raises(ModelError, match=r"input_ids have shape \[5\]"):
        model(tokens(5))
    with pytest.raises(ModelError, match=r"document_ids have shape \[1, 4\]"):
        model(tokens(1, 5), document_ids=tokens(1, 4))
    with pytest.raises(ModelError, match=r"position_ids have shape \[1, 4\]"):
        model(tokens(1, 5), position_ids=tokens(1, 4))
    for arguments in ({"temperature": -1.0}, {"top_k": 0}, {"num_new_tokens": -1}):
        with pytest.raises(ModelError, match="cannot generate"):
            model.generate(tokens(1, 5), **({"num_new_tokens": 1} | arguments))
