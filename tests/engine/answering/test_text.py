"""Stop strings across token boundaries: text sent early, text withheld, and the end of the text."""

import random
from pathlib import Path
from typing import Any

import pytest

from engine.answering.text import OutputText
from wire.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_dir(model)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token per byte, so that every possible boundary occurs."""
    return [tokenizer.encode(char)[0] for char in text]


def feed(tokenizer: Tokenizer, text: str, stops: list[str], **options) -> tuple[list[str], OutputText]:
    output = OutputText(tokenizer, stops, **options)
    pieces = [output.push([token]) for token in letters(tokenizer, text)]
    return [*pieces, output.finish()], output


def test_without_stops_every_token_goes_out_at_once(tokenizer):
    pieces, output = feed(tokenizer, "abc", [])
    assert pieces == ["a", "b", "c", ""]
    assert not output.stopped


def test_only_what_could_begin_a_stop_is_held(tokenizer):
    pieces, output = feed(tokenizer, "xENyEND!", ["END"])
    assert pieces == ["x", "", "", "ENy", "", "", "", "", ""]
    assert output.stopped
    assert output.num_tokens == 7


def test_held_text_comes_out_at_the_end(tokenizer):
    pieces, output = feed(tokenizer, "xEN", ["END"])
    assert pieces == ["x", "", "", "EN"]
    assert not output.stopped


def test_the_stop_is_part_of_the_text_if_asked_for(tokenizer):
    pieces, _ = feed(tokenizer, "abEND!", ["END"], include_stop=True)
    assert "".join(pieces) == "abEND"


def test_a_stop_inside_one_push_counts_the_tokens_up_to_it(tokenizer):
    output = OutputText(tokenizer, ["c"])
    assert output.push(letters(tokenizer, "abcdef")) == "ab"
    assert output.stopped
    assert output.num_tokens == 3


def test_the_first_to_be_complete_ends_the_text(tokenizer):
    assert "".join(feed(tokenizer, "abcd", ["bcd", "c"])[0]) == "ab"
    assert "".join(feed(tokenizer, "abcd", ["cd", "bcd"])[0]) == "a"


def test_no_stop_within_the_minimum(tokenizer):
    pieces, output = feed(tokenizer, "abab", ["b"], min_tokens=2)
    assert "".join(pieces) == "aba"
    assert output.num_tokens == 4


def test_a_stop_of_several_bytes_a_character(tokenizer):
    output = OutputText(tokenizer, ["世界"])
    text = "".join(output.push([token]) for token in tokenizer.encode("你好世界 more"))
    assert text == "你好"
    assert output.stopped


def test_many_long_stops_that_almost_come_cost_no_more_than_the_text(tokenizer):
    """Matching costs time in proportion to the text's length, not to that length times the number of stops."""
    looks = 0

    class Counted(str):
        def startswith(self, *args: Any) -> bool:
            nonlocal looks
            looks += 1
            return str.startswith(self, *args)

    stops = [Counted("ab" * i + "c" * 50) for i in range(1, 9)] + [Counted("ab" * 500 + "x")]
    output = OutputText(tokenizer, stops)
    text = "ab" * 400 + "z" + "ab" * 20
    said = output.push(tokenizer.encode(text)) + output.finish()
    assert said == text
    assert looks <= 2 * len(text) * len(stops)


def test_random_texts_are_cut_as_the_whole_text_would_be(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices("aab", k=rng.randrange(1, 20)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        pieces, output = feed(tokenizer, text, stops)
        assert "".join(pieces) == expected, (text, stops)
        assert output.stopped == bool(ends)
