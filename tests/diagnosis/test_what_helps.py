"""What the doctor advises, and that it judges a gradient norm by the run's own past."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.made_up import COUNT, cosine, examined, falling, first, noise
from surefoot.diagnosis.causes import all_causes


@pytest.mark.parametrize(
    ("slug", "words"),
    [
        ("exploding-gradients", ("clip", "normali", "initiali", "lower")),
        ("vanishing-gradients", ("ReLU", "residual", "normali", "Xavier")),
        ("gradients-not-cleared", ("zero_grad",)),
        ("non-finite-loss-function", ("log",)),
        ("overfitting", ("early", "decay")),
    ],
)
def test_the_fix_of_a_cause_names_what_helps(slug: str, words: tuple[str, ...]) -> None:
    (cause,) = (cause for cause in all_causes() if cause.info.slug == slug)
    fix = cause.info.fix
    assert [word for word in words if word.lower() not in fix.lower()] == []


@pytest.mark.parametrize("level", [0.02, 1.0, 8.0])
def test_a_gradient_norm_is_judged_by_its_own_past(level: float) -> None:
    norm = level * np.exp(noise(0.2))
    columns = {"loss": falling() + noise(0.03, 1), "lr": cosine(), "grad_norm": norm}
    assert first(examined(columns)) is None
    norm[40:COUNT:25] *= 60
    found = examined(columns)
    assert first(found) == "exploding-gradients"
    assert found.findings[0].evidence["median_grad_norm"] == pytest.approx(level, rel=0.2)
