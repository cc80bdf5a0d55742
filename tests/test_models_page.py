"""docs/models.md has a tick for every test of its features that there is, and no other."""

from __future__ import annotations

import pytest

from tests.models_page import OF_DECODERS, PAGE, collected, page, proved


def test_the_page_is_that_of_the_tests() -> None:
    """That these tests pass is told by running them."""
    found = page(dict.fromkeys(collected(), True))
    assert found == PAGE.read_text(encoding="utf-8"), "run `python -m tests.models_page`"


@pytest.mark.parametrize("outcome", [True, False])
def test_a_tick_takes_a_test_that_passes(outcome: bool) -> None:
    feature = OF_DECODERS[0]
    ids = [f"tests/{test.replace('*', 'opt')}" for test in feature.tests]
    assert not proved(feature, "opt", {})
    assert not proved(feature, "opt", {ids[0]: True, ids[1]: False})
    assert not proved(feature, "opt", {ids[0]: True})
    assert proved(feature, "opt", dict.fromkeys(ids, outcome)) is outcome
    one_of = next(feature for feature in OF_DECODERS if feature.either)
    first, second = (f"tests/{test.replace('*', 'opt')}" for test in one_of.either[:2])
    assert not proved(one_of, "opt", {})
    assert proved(one_of, "opt", {first: outcome}) is proved(one_of, "opt", {first: True, second: outcome}) is outcome
    assert ("✓" in page(dict.fromkeys(ids, outcome))) is outcome
