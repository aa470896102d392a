"""Sampling: distributions as asked for, rows independent of one another."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.sampler import sample as sample_on_device
from engine.model.sampler import token_logprobs, uniforms
from engine.scheduling.request import Request, SamplingParams


def request(seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Request:
    r = Request("r", prompt or [1], SamplingParams(max_tokens=1000, **params), seed=seed, stop_ids=frozenset({2}))
    r.token_ids += output or []
    return r


def sample(logits: Tensor, requests: list[Request]) -> list[int]:
    return sample_on_device(logits, requests).tolist()


def draws(logits: Tensor, n: int = 4000, **params: Any) -> Tensor:
    """How often each token comes in n draws, `[vocab]`."""
    rows = sample(logits.repeat(n, 1), [request(seed, **params) for seed in range(n)])
    return torch.bincount(torch.tensor(rows), minlength=len(logits)) / n


LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.0, -1.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(draws(LOGITS, temperature=temperature), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [1]),
        ({"top_p": 0.5}, [1]),
        ({"top_p": 0.8}, [1, 3]),
        ({"top_k": 3, "top_p": 0.999}, [0, 1, 3]),
        ({"min_p": 0.3}, [1, 3]),
        ({"top_k": 4, "min_p": 0.1}, [0, 1, 3]),
    ],
)
def test_what_is_cut_is_never_drawn_and_the_rest_keeps_its_odds(params: dict[str, Any], allowed: list[int]) -> None:
    kept = torch.full_like(LOGITS, -torch.inf)
    kept[allowed] = LOGITS[allowed]
    torch.testing.assert_close(draws(LOGITS, **params), kept.softmax(-1), atol=0.03, rtol=0)


def test_temperature_zero_is_the_argmax() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    assert sample(logits.clone(), [request(temperature=0.0)] * 8) == logits.argmax(-1).tolist()


def test_a_rows_draw_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    mine = request(42, output=[7, 8])
    alone = sample(logits[2:3].clone(), [mine])
    crowd = [request(temperature=0.0), request(1, top_p=0.5), mine, request(2, top_k=3), request(3), request(4)]
    assert sample(logits.clone(), crowd)[2] == alone[0]


def test_the_same_seed_draws_the_same_and_another_draws_otherwise() -> None:
    logits = torch.zeros(1, 1000)

    def sequence(seed: int) -> list[int]:
        return [sample(logits.clone(), [request(seed, output=[1] * i)])[0] for i in range(12)]

    assert sequence(5) == sequence(5)
    assert sequence(5) != sequence(6)
    assert len(set(sequence(5))) > 8


def test_uniforms_are_uniform() -> None:
    numbers = torch.from_numpy(uniforms(range(20000), [1] * 20000))
    assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    histogram = torch.histc(numbers, 10, 0, 1) / len(numbers)
    torch.testing.assert_close(histogram, torch.full((10,), 0.1, dtype=numbers.dtype), atol=0.01, rtol=0)


def test_penalties_and_bias_are_openais_and_hugging_faces() -> None:
    r = request(
        prompt=[0], output=[3, 3, 4], temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=2.0, logit_bias={1: -5.0},
    )  # fmt: skip
    logits = LOGITS.clone()[None]
    sample(logits, [r])
    # repetition: positive logits halved, negative doubled, prompt included; then presence + frequency of the output
    expected = torch.tensor([0.5, 3.0 - 5.0, 0.0, 1.0 - 0.5 - 0.5, -2.0 - 0.5 - 0.25])
    torch.testing.assert_close(logits[0], expected)


def test_min_tokens_bans_the_stop_token_until_then() -> None:
    logits = torch.tensor([0.0, 0.0, 9.0, 1.0, 0.0])[None]
    assert sample(logits.clone(), [request(temperature=0.0, min_tokens=2, output=[1])]) == [3]
    assert sample(logits.clone(), [request(temperature=0.0, min_tokens=2, output=[1, 1])]) == [2]


def test_logprobs_name_the_token_its_rank_and_the_likeliest() -> None:
    [entry] = token_logprobs(LOGITS[None], torch.tensor([3]), 2).entries([2])
    assert entry.rank == 2
    assert entry.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[3]))
    assert entry.top_ids == [1, 3]
