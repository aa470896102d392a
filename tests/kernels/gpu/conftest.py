"""Mark of the Triton tests, which take seconds each in the interpreter."""

import pytest


@pytest.fixture(autouse=True)
def _interpreted(takes_a_core: None) -> None:
    pass
