"""Ranks that are about to train different runs are told how they differ."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.core.errors import RankError
from surefoot.parallel.ranks import OneRank
from surefoot.run.rank_agreement import INITIAL_WEIGHTS, digest_of_code, refuse_differences


class Beside:
    """One rank, and another that brings other facts."""

    rank, size = 0, 2

    def __init__(self, other: dict[str, str]) -> None:
        self.other = other

    def gather(self, what: str, value: Any) -> list[Any]:
        return [value, self.other]

    def channel(self, name: str) -> Beside:
        return self


def test_the_same_facts_are_one_run() -> None:
    refuse_differences(OneRank(), {"torch": "2"})
    refuse_differences(Beside({"torch": "2"}), {"torch": "2"})


def test_a_difference_is_named_with_both_sides_and_what_is_missing() -> None:
    with pytest.raises(RankError, match="1 differences") as caught:
        refuse_differences(Beside({"torch": "3"}), {"torch": "2"})
    assert caught.value.where == "torch: 2 on rank 0, 3 on rank 1"
    with pytest.raises(RankError) as caught:
        refuse_differences(Beside({}), {INITIAL_WEIGHTS: "a"})
    assert "missing on rank 1" in caught.value.where and "manual_seed" in caught.value.remedy


def test_own_code_that_a_recipe_names_is_part_of_the_code() -> None:
    plain = digest_of_code({})
    assert plain == digest_of_code({"model": {"kind": "mlp"}})
    named = {"model": {"target": f"{__name__}:Beside"}}
    assert digest_of_code(named) != plain
    in_a_list = {"observers": [{"kind": "custom", "target": named["model"]["target"]}]}
    assert digest_of_code(in_a_list) == digest_of_code(named)
