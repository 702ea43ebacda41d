"""Which modules are compiled, and that probes run without it. Nothing is compiled here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.core.errors import RequestError
from surefoot.parallel.compilation import blocks_to_compile, compile_model, uncompiled


class Stack(nn.Module):
    """Layers of the given widths in a list of the given name, behind an embedding."""

    def __init__(self, name: str, widths: list[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.add_module(name, nn.ModuleList(nn.Linear(width, width) for width in widths))
        self.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    found: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: found.append(module))
    return found


def test_the_largest_list_of_equal_layers_is_found_whatever_its_name() -> None:
    model = Stack("layers", [8, 8, 8])
    assert blocks_to_compile(model) == list(model.layers)


def test_a_list_that_the_model_calls_blocks_counts_although_its_layers_differ() -> None:
    model = Stack("blocks", [8, 4])
    assert blocks_to_compile(model) == list(model.blocks)


def test_layers_of_other_shapes_are_not_alike() -> None:
    model = Stack("layers", [8, 4])
    assert blocks_to_compile(model) == list(model.heads)
    assert blocks_to_compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_blocks_are_compiled_one_by_one(compiled: list[nn.Module]) -> None:
    model = Stack("layers", [8, 8])
    compile_model(model, "blocks")
    assert compiled == list(model.layers)


def test_the_whole_model_is_compiled_or_nothing(compiled: list[nn.Module]) -> None:
    model = Stack("layers", [8, 8])
    compile_model(model, "off")
    assert compiled == []
    compile_model(model, "whole")
    assert compiled == [model]


def test_a_model_without_equal_layers_has_no_blocks_to_compile() -> None:
    with pytest.raises(RequestError, match="no layers that are built alike"):
        compile_model(nn.Linear(2, 2), "blocks")


def test_inside_a_probe_a_compiled_module_runs_as_it_was_written() -> None:
    seen: list[bool] = []

    class Probe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return x + 1

    model = Probe()
    model.compile(backend="eager")
    with uncompiled("whole"):
        model(torch.ones(2))
    assert seen == [False]
