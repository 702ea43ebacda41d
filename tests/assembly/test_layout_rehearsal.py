"""A recipe's layout over ranks is built without the ranks."""

from __future__ import annotations

import pytest

from surefoot.assembly.layout_rehearsal import rehearse_layout
from surefoot.config.load import load_recipe
from surefoot.core.errors import RequestError


def test_shards_are_a_part_of_the_whole_and_nobody_idles_without_a_pipeline() -> None:
    recipe = load_recipe("diabetes-mlp", ["parallel.shard=2"]).recipe
    rehearsed = rehearse_layout(recipe, 2)
    assert rehearsed.sizes.shard == 2 and rehearsed.bubble_fraction is None
    assert rehearsed.num_parameters > 0 and rehearsed.shares


def test_a_mesh_that_does_not_fit_the_ranks_is_refused() -> None:
    recipe = load_recipe("diabetes-mlp", ["parallel.shard=2"]).recipe
    with pytest.raises(RequestError):
        rehearse_layout(recipe, 3)
