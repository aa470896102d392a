"""References to adapters: each form parses to its parts, and every other text to none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.model_names import ADAPTER_NAME, ALIAS_NAME, MAX_VERSION, Reference, parse_reference

REFERENCES = st.builds(Reference, st.from_regex(ADAPTER_NAME, fullmatch=True), st.integers(1, MAX_VERSION)) | st.builds(
    Reference, st.from_regex(ADAPTER_NAME, fullmatch=True), alias=st.from_regex(ALIAS_NAME, fullmatch=True)
)


def test_the_three_forms():
    assert parse_reference("pirate") == Reference("pirate") == Reference("pirate", None, "latest")
    assert parse_reference("pirate:latest") == Reference("pirate")
    assert parse_reference("pirate@3") == Reference("pirate", 3)
    assert parse_reference("pirate:prod") == Reference("pirate", alias="prod")


@settings(deadline=None, derandomize=True)
@given(REFERENCES)
def test_a_references_text_parses_to_it(reference: Reference):
    assert parse_reference(str(reference)) == reference


OTHERS = (
    *("", "@3", ":prod", "a@", "a:", "a@0", "a@03", "a@-1", "a@1.0", "a@x", "a:3", "a:Prod", "a@3:prod", "a:prod@3"),
    *("a@1234567890", "a@\u0663", "a b", "A", "a*0.5", "a+b", "a@3 ", "a\n", "a:b:c", "a/b", "a" * 65, "a:" + "b" * 33),
    *("sha256:" + digit * 64 for digit in "0a"),
)


@pytest.mark.parametrize("text", OTHERS)
def test_other_texts_are_no_references(text: str):
    assert parse_reference(text) is None
