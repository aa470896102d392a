"""Lower bound of a text's tokens against its encoding, and conversations that it refuses early."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from testing.tiny import TEMPLATE, save_byte_fallback_tokenizer, save_byte_level_tokenizer, save_gemma_tokenizer
from wire.text.lower_bound import PART_CHARS, LeastCount, TokenBound
from wire.text.tokenizer import TextTooLong, Tokenizer

SAVE = [save_byte_level_tokenizer, save_byte_fallback_tokenizer, save_gemma_tokenizer]
MARKS = ["<|start|>", "<|end|>", "<unk>"]


def bound_of(backend: tokenizers.Tokenizer, *written: str) -> TokenBound:
    return TokenBound(backend, json.loads(backend.to_str()), written)


def count(backend: tokenizers.Tokenizer, text: str) -> int:
    return len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("save", SAVE)
def test_no_text_has_fewer_tokens_than_its_bound(tmp_path: Path, save: Any):
    save(tmp_path)
    backend = Tokenizer.from_dir(tmp_path)._backend
    bound = bound_of(backend, *MARKS)
    parts = [*MARKS, "\n", " ", "a", "user\n", "<think>", "two words", "<|st", "é", "\x00", "🎉", ""]
    draw = random.Random(1)
    most = 0
    for _ in range(2000):
        text = "".join(draw.choices(parts, k=draw.randrange(12)))
        least = bound.of(text)
        assert least <= count(backend, text), text
        most = max(most, least)
    assert most > 8


def test_a_rendered_message_counts_its_special_tokens_and_the_text_between(tmp_path: Path):
    save_byte_level_tokenizer(tmp_path)
    bound = bound_of(Tokenizer.from_dir(tmp_path)._backend, TEMPLATE)
    assert bound.of("a<|start|>user\nb<|end|>\n<|start|>user\nb<|end|>\n") == 4 + 3
    # <unk> is no part of the template.
    assert bound.of("<unk><unk>") == 0


@pytest.mark.parametrize(
    ("added", "text", "tokens"),
    [
        # The longest token at a place counts, so a token within another one has none of its own.
        (["<s>", "<s><s>"], "<s><s>", 1),
        (["<s>", "s><s"], "<s><s>", 2),
        (["aba"], "ababa", 2),
    ],
)
def test_tokens_that_overlap_do_not_count(added: list[str], text: str, tokens: int):
    vocabulary = {"a": 0, "b": 1, "<": 2, "s": 3, ">": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.add_special_tokens(added)
    assert count(backend, text * 3) >= tokens
    assert bound_of(backend, text).of(text * 3) == 0


@pytest.mark.parametrize("option", ["lstrip", "rstrip"])
def test_text_between_tokens_that_take_spaces_does_not_count(option: str):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġ": 0}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([tokenizers.AddedToken("<s>", **{option: True})])
    assert count(backend, "<s> <s>") == 2
    assert bound_of(backend, "<s>").of("<s> <s>") == 2


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        tokenizers.pre_tokenizers.WhitespaceSplit(),
        tokenizers.pre_tokenizers.Split(" ", "removed"),
    ],
)
def test_text_that_may_have_no_token_does_not_count(pre_tokenizer: Any):
    """A vocabulary without a byte leaves it out, and some pre-tokenizers leave out spaces."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens(["<s>"])
    assert count(backend, "<s> <s>") == 2
    assert bound_of(backend, "<s>").of("<s> <s>") == 2


class Rendered:
    """Message contents that count how many of them a template has written."""

    def __init__(self) -> None:
        self.count = 0

    def __str__(self) -> str:
        self.count += 1
        return "a"

    def __html__(self) -> str:
        return str(self)


def test_a_conversation_of_many_short_messages_is_refused_before_it_is_rendered_and_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_byte_level_tokenizer(tmp_path, TEMPLATE.replace("m['content'] | trim", "m['content']"))
    tokenizer = Tokenizer.from_dir(tmp_path)
    content = Rendered()
    messages = [{"role": "user", "content": content}] * 4001
    assert len(tokenizer.encode_chat(messages)) > 16_000
    assert content.count == 4001
    monkeypatch.setattr(tokenizer, "_encode", None)
    content.count = 0
    with pytest.raises(TextTooLong) as caught:
        tokenizer.encode_chat(messages, limit=8192)
    assert caught.value.at_least == 8192
    # Each message has two special tokens and the text between and after them.
    assert content.count < 8192 / 4 + PART_CHARS / 20


def test_a_conversation_within_the_limit_is_encoded_whole(tmp_path: Path):
    save_byte_level_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    messages = [{"role": "user", "content": ""}] * 4001
    tokens = tokenizer.encode_chat(messages)
    assert tokenizer.encode_chat(messages, limit=len(tokens)) == tokens
    continued = [*messages, {"role": "assistant", "content": "a"}]
    tokens = tokenizer.encode_chat(continued, None, False, True)
    assert tokenizer.encode_chat(continued, None, False, True, limit=len(tokens)) == tokens
    with pytest.raises(TextTooLong):
        tokenizer.encode_chat(continued, None, False, True, limit=len(tokens) // 2)


def test_pieces_count_like_their_text(tmp_path: Path):
    save_byte_level_tokenizer(tmp_path)
    bound = bound_of(Tokenizer.from_dir(tmp_path)._backend, TEMPLATE)
    text = "<|start|>a<|end|>" * (4 * PART_CHARS // 17)
    exact = 2 * len(text) // 17 * 2 - 1
    for size in (5, 17, PART_CHARS, len(text)):
        limit = exact - 100
        least = LeastCount(bound, limit)
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert not any(map(least.add, pieces[: len(pieces) // 2]))
        assert not any(map(LeastCount(bound, exact).add, pieces))
    assert LeastCount(bound, exact // 2).add(text)
