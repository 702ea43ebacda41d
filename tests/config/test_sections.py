"""Sections: they mirror what they configure, cannot change, and have a JSON schema."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, get_args

import pydantic
import pytest

from surefoot.config.sections import (
    GPTSection,
    MLPSection,
    Recipe,
    ResNetSection,
    Section,
    Settings,
    TrainSection,
)
from surefoot.config.sections.models import ExpertsSection, ModelBase
from surefoot.core.units import Steps
from surefoot.models.gpt import GPTConfig
from surefoot.models.mlp import MLPConfig
from surefoot.models.moe import MoEConfig
from surefoot.models.resnet import ResNetConfig

CHOICES = {"from-data", "as-heads"}


@pytest.mark.parametrize(
    ("section", "config"),
    [(GPTSection, GPTConfig), (ResNetSection, ResNetConfig), (MLPSection, MLPConfig)],
)
def test_a_model_section_has_the_fields_of_its_model(section: type[ModelBase], config: Any) -> None:
    ours = {
        name: field
        for name, field in section.model_fields.items()
        if name not in {"kind", *ModelBase.model_fields}
    }
    theirs = {field.name: field for field in dataclasses.fields(config)}
    assert list(ours) == list(theirs)
    for name, field in theirs.items():
        if ours[name].default in CHOICES:
            continue
        assert ours[name].is_required() == (field.default is dataclasses.MISSING), name
        if not ours[name].is_required():
            assert ours[name].default == field.default, name


def test_the_architecture_builds_the_model_config() -> None:
    section = GPTSection(kind="gpt", num_layers=1, num_heads=2, embedding_dim=8, feedforward_dim=16)
    fields = section.architecture()
    assert fields["num_kv_heads"] == 2
    assert fields["vocabulary_size"] == fields["sequence_length"] == "from-data"
    config = GPTConfig(**fields | {"vocabulary_size": 10, "sequence_length": 4})
    assert config.embedding_dim == 8
    own = GPTSection(
        kind="gpt", num_layers=1, num_heads=2, num_kv_heads=1, embedding_dim=8, feedforward_dim=16
    )
    assert own.architecture()["num_kv_heads"] == 1


def test_literals_of_models_are_those_of_their_sections() -> None:
    pairs = [(GPTSection, GPTConfig), (ResNetSection, ResNetConfig), (MLPSection, MLPConfig)]
    compared = 0
    for section, config in pairs:
        hints = typing.get_type_hints(config)
        for name, hint in hints.items():
            if typing.get_origin(hint) is typing.Literal:
                assert get_args(section.model_fields[name].annotation) == get_args(hint), name
                compared += 1
    assert compared == 9


def test_a_section_cannot_change() -> None:
    train = TrainSection(horizon=Steps(3), micro_batch=1)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        train.micro_batch = 2  # type: ignore[misc]


def all_sections(kind: type[Section] = Section) -> set[type[Section]]:
    found = set(kind.__subclasses__())
    return found.union(*(all_sections(inner) for inner in found)) if found else found


def test_no_section_lets_an_unknown_key_pass() -> None:
    sections = all_sections()
    assert len(sections) > 40
    assert all(section.model_config["extra"] == "forbid" for section in sections)
    assert all(section.model_config["frozen"] for section in sections)
    assert all(section.__doc__ for section in sections)


def test_no_section_means_auto_by_none_or_by_a_negative_number() -> None:
    for section in all_sections():
        for name, field in section.model_fields.items():
            assert field.default is not None, (section, name)
            assert type(None) not in get_args(field.annotation), (section, name)
            if isinstance(field.default, (int, float)):
                assert field.default >= 0, (section, name)


def test_json_schema() -> None:
    schema = Recipe.model_json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(Settings.model_json_schema()["properties"]) < set(schema["properties"])
    forms = [form["$ref"] for form in schema["properties"]["optimizer"]["oneOf"]]
    assert [form.rpartition("/")[2] for form in forms] == [
        *("AdamWSection", "AdamSection", "SGDSection", "OwnOptimizerSection")
    ]


def test_the_section_of_experts_has_the_fields_of_their_config() -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(MoEConfig)}
    ours = {name: field.default for name, field in ExpertsSection.model_fields.items()}
    assert list(ours) == list(theirs)
    assert {n: v for n, v in ours.items() if n != "num_experts"} == {
        n: v for n, v in theirs.items() if n != "num_experts"
    }


def test_experts_are_a_section_or_none() -> None:
    shape = {"kind": "gpt", "num_layers": 1, "num_heads": 2, "embedding_dim": 8}
    dense = GPTSection(**shape, feedforward_dim=16)
    assert dense.experts == "none" and "experts" not in dense.architecture()
    routed = GPTSection(**shape, feedforward_dim=16, experts={"num_experts": 4, "expert_dim": 8})
    fields = routed.architecture() | {"vocabulary_size": 10, "sequence_length": 4}
    assert json.loads(json.dumps(fields)) == fields
    config = GPTConfig(**{name: v for name, v in fields.items() if name != "kind"})
    assert config.experts == MoEConfig(num_experts=4, expert_dim=8)
    with pytest.raises(pydantic.ValidationError) as refused:
        GPTSection(**shape, feedforward_dim=16, experts={"num_experts": 4, "top_k": 2})
    assert [detail["loc"] for detail in refused.value.errors()] == [("experts", "top_k")]
