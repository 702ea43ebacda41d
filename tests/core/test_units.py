"""Counts: they parse, print, order and refuse to mix."""

from __future__ import annotations

import operator
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import MixedUnitsError, RequestError
from surefoot.core.units import (
    Bytes,
    Count,
    Epochs,
    Flops,
    Samples,
    Seconds,
    Steps,
    Tokens,
    parse_count,
)

KINDS: tuple[type[Count], ...] = (Steps, Tokens, Samples, Epochs, Seconds, Bytes, Flops)
WHOLE = tuple(kind for kind in KINDS if kind.whole)
wholes = st.integers(min_value=0, max_value=10**18)
floats = st.floats(min_value=0, max_value=1e300, allow_nan=False)


def counts() -> st.SearchStrategy[Count]:
    return st.one_of(
        *(st.builds(kind, wholes if kind.whole else st.one_of(wholes, floats)) for kind in KINDS)
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10_000 steps", Steps(10_000)),
        ("1 update", Steps(1)),
        ("3k steps", Steps(3_000)),
        ("1e3 steps", Steps(1_000)),
        ("3K steps", Steps(3_000)),
        ("375M tokens", Tokens(375_000_000)),
        ("1.5B tokens", Tokens(1_500_000_000)),
        ("2T tokens", Tokens(2 * 10**12)),
        ("0.1k samples", Samples(100)),
        ("2 epochs", Epochs(2)),
        ("0.5 epochs", Epochs(0.5)),
        ("30 min", Seconds(1800)),
        ("1.5h", Seconds(5400)),
        ("2 d", Seconds(172_800)),
        ("0.25 s", Seconds(0.25)),
        ("4 GiB", Bytes(4 * 2**30)),
        ("4 GB", Bytes(4 * 10**9)),
        ("512 B", Bytes(512)),
        ("1 TiB", Bytes(2**40)),
        ("1e18 FLOPs", Flops(10**18)),
        (" 7  Steps ", Steps(7)),
    ],
)
def test_parse(text: str, count: Count) -> None:
    parsed = parse_count(text)
    assert parsed == count
    assert type(parsed) is type(count)


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("1000", "has no unit", "'1000 steps'"),
        ("10 setps", "unknown unit 'setps'", "'steps'"),
        ("10 tokns", "unknown unit 'tokns'", "'tokens'"),
        ("1.5 steps", "not a whole number of steps", ""),
        ("1,000 steps", "is not a count", "'1000 steps'"),
        ("steps", "is not a count", "'1000 steps'"),
        ("-3 steps", "is not a count", "'1000 steps'"),
        ("", "is not a count", "'1000 steps'"),
        ("4 Gb", "unknown unit 'Gb'", "GB"),
        ("1e999 s", "is not a count of seconds", ""),
    ],
)
def test_refused(text: str, what: str, remedy: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_count(text)
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert caught.value.rule


@given(counts())
def test_text_round_trip(count: Count) -> None:
    parsed = parse_count(str(count))
    assert parsed == count
    assert type(parsed) is type(count)
    assert str(parsed) == str(count)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (Steps(1), "1 step"),
        (Steps(2), "2 steps"),
        (Steps(0), "0 steps"),
        (Tokens(1), "1 token"),
        (Epochs(1), "1 epoch"),
        (Epochs(0.5), "0.5 epochs"),
        (Seconds(1), "1 s"),
        (Seconds(5400), "5400 s"),
        (Bytes(1), "1 B"),
        (Flops(1e18), "1e+18 FLOPs"),
    ],
)
def test_text(count: Count, text: str) -> None:
    assert str(count) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_count_cannot_change(kind: type[Count]) -> None:
    with pytest.raises(FrozenInstanceError):
        kind(1).value = 2  # type: ignore[misc]


@given(counts())
def test_pickle_round_trip(count: Count) -> None:
    assert pickle.loads(pickle.dumps(count)) == count


@given(st.sampled_from(WHOLE), wholes, wholes)
def test_arithmetic_of_one_kind_is_that_of_numbers(kind: Any, a: int, b: int) -> None:
    assert kind(a) + kind(b) == kind(a + b)
    assert kind(max(a, b)) - kind(min(a, b)) == kind(abs(a - b))
    assert kind(a) * 3 == 3 * kind(a) == kind(3 * a)
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        assert compare(kind(a), kind(b)) is compare(a, b)
    if b:
        assert kind(a) / kind(b) == a / b
        assert kind(a) // kind(b) == a // b
        assert kind(a) % kind(b) == kind(a % b)
    assert bool(kind(a)) is bool(a)
    assert hash(kind(a)) == hash(kind(a))


OPERATIONS = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
def test_kinds_do_not_mix(operation: Any, left: Any, right: Any) -> None:
    if left is right and operation is not operator.mul:
        operation(left(6), right(3))
        return
    with pytest.raises(MixedUnitsError) as caught:
        operation(left(6), right(3))
    assert isinstance(caught.value, TypeError)
    assert left.kind in str(caught.value)
    assert right.kind in str(caught.value)


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op is not operator.mul])
def test_plain_numbers_do_not_mix(operation: Any) -> None:
    with pytest.raises(MixedUnitsError, match="steps"):
        operation(Steps(6), 3)


def test_equality_between_kinds_is_false_and_safe_in_a_dictionary() -> None:
    assert Steps(1) != Tokens(1)
    assert {Steps(1): "a", Tokens(1): "b"}[Tokens(1)] == "b"


@pytest.mark.parametrize("value", [1.5, True, "3", None])
def test_whole_things_are_counted_whole(value: Any) -> None:
    with pytest.raises(RequestError, match="steps are counted with a whole number"):
        Steps(value)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), -0.5])
def test_no_negative_or_infinite_count(value: float) -> None:
    with pytest.raises(RequestError, match="not a count of seconds"):
        Seconds(value)


def test_the_base_counts_nothing() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Count(1)


def test_a_fraction_of_a_whole_thing_is_refused() -> None:
    with pytest.raises(RequestError):
        Steps(3) * 0.5
    assert Seconds(3) * 0.5 == Seconds(1.5)
