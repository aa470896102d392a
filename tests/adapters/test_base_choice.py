"""The base model of an uploaded adapter: named, derived from its config or its shapes, or refused with one line."""

from pathlib import Path

import pytest

from adapters.base_choice import choose_base, named_base
from adapters.checkpoint import AdapterCheckpoint, open_checkpoint
from adapters.manifest import AdapterError, BaseShape
from testing.adapter_files import BASE, write

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "num_hidden_layers": 3}
WIDER = BaseShape.from_config(SHAPE | {"hidden_size": 32})
SHALLOW = BaseShape.from_config(SHAPE | {"hidden_size": 16, "num_hidden_layers": 2})


@pytest.fixture
def checkpoint(tmp_path: Path) -> AdapterCheckpoint:
    return open_checkpoint(write(tmp_path / "a"))


NAMES = ["meta-llama/Llama-3.2-1B", "Llama-3.2-1B-Instruct", "qwen"]


@pytest.mark.parametrize(
    ("trained_on", "expected"),
    [
        ("meta-llama/Llama-3.2-1B", NAMES[0]),
        ("unsloth/llama-3.2-1b", NAMES[0]),
        ("/home/me/models/Llama-3.2-1B-Instruct/", NAMES[1]),
        ("QWEN", "qwen"),
        ("mistral", None),
        ("", None),
        (None, None),
        (["qwen"], None),
        ("a\ud800", None),
    ],
)
def test_a_base_is_named_by_its_last_part(trained_on: object, expected: str | None):
    assert named_base(trained_on, NAMES) == expected


def test_two_bases_of_one_last_part_are_not_guessed():
    assert named_base("x/llama", ["a/llama", "b/llama"]) is None
    assert named_base("b/llama", ["a/llama", "b/llama"]) == "b/llama"


@pytest.mark.parametrize(
    ("trained_on", "bases", "expected"),
    [
        ("elsewhere/other", {"a": BASE}, "a"),
        (None, {"a": BASE, "b": WIDER}, "a"),
        (None, {"a": WIDER, "b": SHALLOW, "c": BASE}, "c"),
        ("hub/b", {"a": BASE, "b": BASE}, "b"),
    ],
)
def test_the_base_that_is_clear(
    checkpoint: AdapterCheckpoint, trained_on: object, bases: dict[str, BaseShape], expected: str
):
    assert choose_base(checkpoint, trained_on, bases) == expected


@pytest.mark.parametrize(
    ("trained_on", "bases", "field", "message"),
    [
        (None, {"a": BASE, "b": BASE}, "base", "fits several base models: 'a', 'b'; name its own as 'base'"),
        (None, {"a": WIDER, "b": SHALLOW}, "base", r"fits no base model: 'a': .*; 'b': .* has 2 layers"),
        (None, {"a": WIDER}, "base_model", "is this adapter for another model"),
        ("hub/b", {"a": BASE, "b": WIDER}, "base_model", "is this adapter for another model"),
        ("hub/old", {"a": BASE}, "base_model_name_or_path", "'old' takes no new adapters"),
    ],
)
def test_an_adapter_of_no_clear_base(
    checkpoint: AdapterCheckpoint, trained_on: object, bases: dict[str, BaseShape], field: str, message: str
):
    with pytest.raises(AdapterError, match=message) as refused:
        choose_base(checkpoint, trained_on, bases, closed=["old"])
    assert refused.value.field.startswith(field)
