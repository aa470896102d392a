"""Sampling: correct distributions, and rows independent of each other."""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution.sampler import SamplingTables, token_logprobs
from engine.execution.sampler import sample as sample_on_device
from engine.execution.sampling_tables import AllowedTable, DrawTable, TokenTable
from engine.execution.transfer import upload
from engine.scheduling.logit_edits import TokenCounts
from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from kernels import reference
from kernels.cpu import sampling as cpu_sampling
from kernels.cpu.plain import TorchOps
from testing.card import Card
from testing.sampling import sample_rows


def request(seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Request:
    r = Request(
        NewRequest("r", prompt or [1], SamplingParams(max_tokens=1000, **params)), seed=seed, stop_ids=frozenset({2})
    )
    r.token_ids += output or []
    return r


def sample(logits: Tensor, requests: list[Request]) -> list[int]:
    return sample_rows(logits, requests).tolist()


def draws(logits: Tensor, n: int = 4000, **params: Any) -> Tensor:
    """Return the frequency of each token in n draws, `[vocab]`."""
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


@pytest.mark.parametrize("vocab", [1, 5, 257, 3000])
def test_the_cpu_draws_what_the_reference_draws(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    n = 400
    logits = 4 * torch.randn(n, vocab, generator=generator)
    logits[::7] = logits[::7].round()  # many ties
    logits[3::11, ::2] = -torch.inf if vocab > 1 else 0.0

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (n,), generator=generator)]

    parameters = (
        one_of(0, 0.5, 1, 2),
        one_of(0, 1, 2, 40, 5000).int(),
        one_of(1, 1, 0.01, 0.5, 0.95, 0.9999),
        one_of(0, 0, 0.05, 0.5),
        torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator),
        torch.randint(1, 9999, (n,), generator=generator),
    )
    assert torch.equal(cpu_sampling.sample(logits, *parameters), reference.sample(logits, *parameters))


@pytest.mark.parametrize("vocab", [256, 300])
def test_logits_whose_quotients_overflow_draw_what_the_reference_draws(vocab: int) -> None:
    """An adapter may give finite logits of this size. A vocabulary of 256 leaves no tokens after the last whole run."""
    generator, n = torch.Generator().manual_seed(vocab), 64
    logits = 1e38 * torch.randn(n, vocab, generator=generator).clamp(-3, 3)
    logits[::2, :9] = 3e38

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (n,), generator=generator)]

    parameters = (
        one_of(1e-5, 0.01, 0.5, 2),
        one_of(0, 1, 5, 40).int(),
        one_of(1, 0.5, 0.95),
        one_of(0, 0.1, 1),
        torch.arange(n),
        torch.ones(n, dtype=torch.int64),
    )
    assert torch.equal(cpu_sampling.sample(logits, *parameters), reference.sample(logits, *parameters))


@pytest.mark.parametrize("hole", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_give_a_token_all_the_same(hole: float) -> None:
    crowd = [request(0), request(1, top_p=0.5), request(2, top_k=3), request(3, min_p=0.1), request(temperature=0.0)]
    for logits in (torch.full((5, 300), hole), torch.zeros(5, 300).index_fill(1, torch.tensor([7]), hole)):
        assert all(0 <= token < 300 for token in sample(logits, crowd))


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


def test_what_may_not_come_never_comes_and_rows_beside_are_untouched() -> None:
    """Forbidden tokens are never drawn in a batch of rows of every kind; a twin forbids one token after the other."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    vocab = 70
    for _ in range(60):
        requests, kept = [], []
        for _ in range(rng.randrange(1, 6)):
            output = [rng.randrange(4) for _ in range(rng.randrange(5))]
            allowed = rng.sample(range(vocab), rng.randrange(1, 6)) if rng.random() < 0.5 else None
            words = [[rng.randrange(4) for _ in range(rng.randrange(1, 3))] for _ in range(rng.randrange(3))]
            params: dict[str, Any] = {"temperature": rng.choice([0.0, 1.0]), "min_tokens": rng.choice([0, 9])}
            params["allowed"] = None if allowed is None else AllowedTokens(allowed)
            params["bad_words"] = BannedWords(words) if words else None
            requests.append(request(rng.randrange(99), output=output, **params))
            left = set(range(vocab) if allowed is None else allowed)
            # A rule that would leave no token is ignored.
            left = left - {word[-1] for word in words if len(word) == 1 or word[:1] == output[-1:]} or left
            kept.append(left - {2} or left if params["min_tokens"] else left)
        logits = 3 * torch.randn(len(requests), vocab, generator=generator)
        edited = logits.clone()
        tokens = sample(edited, requests)
        for row, left in enumerate(kept):
            expected = torch.full((vocab,), -torch.inf)
            expected[sorted(left)] = logits[row, sorted(left)]
            assert torch.equal(edited[row], expected)
            assert tokens[row] in left
            if requests[row].params.temperature == 0:
                assert tokens[row] == int(expected.argmax())


def test_logprobs_name_the_token_its_rank_and_the_likeliest() -> None:
    [entry] = token_logprobs(LOGITS[None], torch.tensor([3]), 2).entries([2])
    assert entry.rank == 2
    assert entry.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[3]))
    assert entry.top_ids == [1, 3]


@pytest.mark.parametrize("prompt", [[1], [5, 5, 7, 1], list(range(300))])
def test_counts_follow_a_growing_list(prompt: list[int]) -> None:
    rng = random.Random(len(prompt))
    tokens = list(prompt)
    everything, output = TokenCounts(0), TokenCounts(len(prompt))
    for _ in range(200):
        tokens += [rng.randrange(150) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
        for counts, counted in ((everything, tokens), (output, tokens[len(prompt) :])):
            found = dict(zip(*(part.tolist() for part in counts.update(tokens)), strict=True))
            assert found == Counter(counted)


def test_penalties_of_a_stream_are_those_of_its_text_at_once() -> None:
    params = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.0}
    stream = request(prompt=[3, 4, 4], logit_bias={9: 0.7}, **params)
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        logits = torch.randn(1, 12, generator=generator)
        output = stream.token_ids[3:]
        at_once = request(prompt=[3, 4, 4], output=output, logit_bias={9: 0.7}, **params)
        [token] = sample(logits.clone(), [at_once])
        assert sample(logits, [stream]) == [token]
        stream.token_ids.append(token)


def test_counts_on_the_device_give_the_logits_of_counts_on_the_host() -> None:
    """Requests take, leave and share seats over many steps, and one is computed again; each step's logits are equal,
    by tables of counts, allowed tokens, bias and bans that stay on the device, and by edits made anew from the text.
    """
    generator = random.Random(0)
    device = torch.device("cpu")
    tables = {
        True: SamplingTables(DrawTable(3), TokenTable(3, 30, device), AllowedTable(3, 30, device)),
        False: SamplingTables(DrawTable(3), None),
    }
    sets = [None, None, AllowedTokens([1, 5, 29]), AllowedTokens([2, 3])]
    running: dict[int, tuple[Request, Request]] = {}
    for step in range(150):
        if step % 10 == 0:
            tables[False] = SamplingTables(DrawTable(3), None)
        for seat in range(3):
            if seat not in running or generator.random() < 0.1:
                prompt = [generator.randrange(30) for _ in range(generator.randrange(1, 9))]
                params: dict[str, Any] = {"repetition_penalty": generator.choice([1.0, 1.3])}
                params |= {"frequency_penalty": generator.choice([0.0, 0.7]), "temperature": generator.choice([0, 1])}
                params |= {"logit_bias": generator.choice([{}, {4: 2.0}]), "min_tokens": generator.choice([0, 3])}
                params |= {"allowed": generator.choice(sets)}
                params["bad_words"] = generator.choice([None, BannedWords([[4], [3, 5]])])
                pair = request(step, prompt, **params), request(step, prompt, **params)
                running[seat] = pair
                for each in pair:
                    each.seat = seat
            elif generator.random() < 0.1:  # preempted, with another in its seat until it goes on
                tables[True].tokens.penalise(torch.zeros(1, 30), [(0, _stranger(seat))], TorchOps())  # type: ignore[union-attr]
        order = generator.choice([[0, 1, 2], [0, 1, 2], [2, 0, 1]])
        logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(step))
        edited, tokens = {}, {}
        for which, on_device in ((0, True), (1, False)):
            edited[on_device] = logits.clone()
            found = [running[seat][which] for seat in order]
            tokens[on_device] = sample_on_device(edited[on_device], found, TorchOps(), tables[on_device]).tolist()
            for each, token in zip(found, tokens[on_device], strict=True):
                each.token_ids.append(token)
        torch.testing.assert_close(edited[True], edited[False])
        assert tokens[True] == tokens[False]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"allowed": AllowedTokens([3, 4])},
        {"logit_bias": {3: 1.0, 5: -1.0}},
        {"min_tokens": 99},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    ],
)
def test_a_step_of_the_same_requests_uploads_no_edit_again(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the bytes of each step's uploads. A mask has 4 KiB, a request's text 3,000 tokens."""
    uploaded: list[int] = []

    def counted(device: torch.device, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        uploaded.append(sum(array.nbytes for array in arrays))
        return upload(device, arrays)

    for name in ("sampler", "sampling_tables", "masks", "edit_uploads"):
        monkeypatch.setattr(f"engine.execution.{name}.upload", counted)
    device = torch.device("cpu")
    tables = SamplingTables(DrawTable(2), TokenTable(2, 32768, device), AllowedTable(2, 32768, device))
    text = list(range(10, 3010))
    requests = [request(1, text, temperature=0, **params), request(2, text, temperature=0, **params)]
    requests[0].seat, requests[1].seat = 0, 1

    def step() -> None:
        tokens = sample_on_device(torch.randn(2, 32768), requests, TorchOps(), tables).tolist()
        for each, token in zip(requests, tokens, strict=True):
            each.token_ids.append(token)

    step()
    assert bool(uploaded) == bool(params)
    uploaded.clear()
    for _ in range(3):
        step()
    # Bytes of a row: its number and seat, 8 each; for penalties these twice, and three penalties of 4.
    of_a_row = 16 if "allowed" in params else 2 * 16 + 12 if "repetition_penalty" in params else 0
    assert sum(uploaded) == 3 * 2 * of_a_row


class ReadList(list[Request]):
    """Requests that count how often one of them is read."""

    reads = 0

    def __iter__(self) -> Iterator[Request]:
        self.reads += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


class NoDraws(TorchOps):
    """Ops whose draws take one call for all rows, as a GPU's."""

    def sample(self, logits: Tensor, *parameters: Tensor) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.int64)


@pytest.mark.parametrize(
    "params", [{}, {"repetition_penalty": 1.1}, {"allowed": AllowedTokens([3])}, {"min_tokens": 9}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_of_the_same_requests_does_no_work_for_the_plain_ones(
    temperature: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the calls of a later step, and the requests that it reads, beside one request that may need edits."""
    monkeypatch.setattr("engine.execution.sampler.platform_of", lambda _: Card(1 << 30))
    device, calls = torch.device("cpu"), Counter[int]()
    for number in (8, 64):
        tables = SamplingTables(DrawTable(number), TokenTable(number, 40, device), AllowedTable(number, 40, device))
        requests = ReadList(request(seed, temperature=temperature) for seed in range(number - 1))
        requests.append(request(99, temperature=temperature, **params))
        for seat, each in enumerate(requests):
            each.seat = seat
        index, lengths = np.arange(number), np.ones(number, np.int64)

        def count(_frame: Any, event: str, _argument: Any, number: int = number) -> None:
            calls[number] += event in ("call", "c_call")

        sample_on_device(torch.zeros(number, 40), requests, NoDraws(), tables, index=index, lengths=lengths)
        requests.reads, logits = 0, torch.zeros(number, 40)
        sys.setprofile(count)
        try:
            sample_on_device(logits, requests, NoDraws(), tables, index=index, lengths=lengths)
        finally:
            sys.setprofile(None)
        assert not requests.reads
    assert 0 < calls[8] == calls[64]


def _stranger(seat: int) -> Request:
    other = request(99, [1, 2, 3], repetition_penalty=1.5)
    other.seat = seat
    return other
