"""Runs last in a whole run: every refusal of the sources was met by a test that matches its message."""

from tests import refusals


def test_every_refusal_has_a_test_of_its_message() -> None:
    assert not refusals.unmet(), "no pytest.raises(..., match=...) executes these"
