"""Allowed tokens and banned words, against twins that check every token."""

import random

import numpy as np

from engine.scheduling.token_rules import AllowedTokens, BannedWords


def test_allowed_tokens_are_the_bits_that_are_set() -> None:
    rng = random.Random(0)
    for vocab in (1, 31, 32, 33, 1000):
        ids = [rng.randrange(vocab) for _ in range(rng.randrange(1, 40))]
        allowed = AllowedTokens(ids)
        bits = np.zeros((vocab + 31) // 32, np.uint32)
        allowed.fill(bits)
        assert allowed.largest == max(ids)
        assert [i for i in range(vocab) if int(bits[i // 32]) >> i % 32 & 1] == sorted(set(ids))


def banned_slowly(words: list[list[int]], output: list[int]) -> set[int]:
    return {
        word[-1]
        for word in words
        if word[:-1] == output[len(output) - len(word) + 1 :] and len(word) <= len(output) + 1
    }


def test_a_word_s_last_token_is_banned_where_the_others_are_the_last_of_the_output() -> None:
    rng = random.Random(0)
    for _ in range(300):
        words = [[rng.randrange(3) for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(1, 8))]
        prompt, output = ([rng.randrange(3) for _ in range(rng.randrange(6))] for _ in range(2))
        banned = BannedWords(words)
        assert set(banned.after(prompt + output, len(output)).tolist()) == banned_slowly(words, output)
        assert banned.largest == max(map(max, words))
