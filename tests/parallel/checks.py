"""What it means that several ranks have trained as one process does."""

from __future__ import annotations

import pytest
import torch

from parallel.small_runs import Seen


def assert_alike(found: list[Seen], expected: Seen, rtol: float) -> None:
    """Losses, norms, counts, weights and metrics; on every rank the same, to the bit."""
    for seen in found:
        assert seen.losses == pytest.approx(expected.losses, rel=rtol, abs=0)
        assert seen.norms == pytest.approx(expected.norms, rel=max(rtol, 1e-9), abs=0)
        assert seen.weight_norms == pytest.approx(expected.weight_norms, rel=max(rtol, 1e-9))
        assert seen.counts == expected.counts
        # The last ones, where `expected` has seen a longer run; losses tell a missing update.
        for own, other in zip(seen.terms, expected.terms[-len(seen.terms) :], strict=True):
            assert own == pytest.approx(other, rel=rtol, abs=0)
        assert seen.metrics == pytest.approx(expected.metrics, rel=rtol, abs=0)
        assert (seen.losses, seen.norms) == (found[0].losses, found[0].norms)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(seen.weights[name], weight, rtol=rtol, atol=rtol)
            assert torch.equal(seen.weights[name], found[0].weights[name]), name
