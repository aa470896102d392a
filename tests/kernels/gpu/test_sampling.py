"""The sampler in Triton against `kernels.reference.sample`: every kind of row, alone and beside others."""

import pytest
import torch

from kernels import reference
from kernels.gpu import sampling as module
from kernels.gpu.sampling import sample

# temperature, top_k, top_p, min_p
ROWS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "greedy with cuts": (0.0, 5, 0.5, 0.1),
    "plain": (1.0, 0, 1.0, 0.0),
    "hot": (5.0, 0, 1.0, 0.0),
    "top-k": (0.7, 20, 1.0, 0.0),
    "top-k of one": (2.0, 1, 1.0, 0.0),
    "top-k of more than there are": (2.0, 10**9, 1.0, 0.0),
    "top-p": (1.0, 0, 0.9, 0.0),
    "top-p of nearly nothing": (1.5, 0, 1e-6, 0.0),
    "min-p": (1.3, 0, 1.0, 0.05),
    "all": (1.1, 50, 0.8, 0.01),
}


def parameters(rows, device, seed=0):
    columns = zip(*rows, strict=True)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    tensors = [torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, dtypes, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    tensors.append(torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=generator))
    tensors.append(torch.randint(0, 5000, (len(rows),), generator=generator))
    return [tensor.to(device) for tensor in tensors]


def logits(num_rows, vocab, device, seed=0):
    return (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(device)


@pytest.mark.parametrize("vocab", [900, 2500])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_rows_divided_among_programs(vocab, spread, device):
    """The kept tokens answer where they can; equal logits and flat distributions go to the last launch."""
    rows = [*ROWS.values(), (1.0, 0, 0.999, 0.0), (1.0, 100, 0.5, 0.0), (1.0, 200, 1.0, 0.0), (0.8, 0, 1.0, 0.6)]
    x = logits(len(rows), vocab, device) / 3 * spread
    x[4:, ::3] = float("-inf")
    x[7] = 1.0
    arguments = parameters(rows, device)
    tokens = sample(x, *arguments, part=256)
    assert tokens.tolist() == reference.sample(x.cpu(), *[a.cpu() for a in arguments]).tolist()


def test_the_kept_tokens_answer_usual_cuts(device, monkeypatch):
    """Qwen's top-k of 20 and top-p of 0.8 do not reach the launch that reads whole rows."""
    rows = [(0.7, 20, 0.8, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1), (1.0, 0, 1.0, 0.0)]
    x, arguments = logits(len(rows), 3000, device), parameters(rows, device)
    empty, made = torch.empty, []
    monkeypatch.setattr(module.torch, "empty", lambda *args, **kw: made.append(empty(*args, **kw)) or made[-1])
    sample(x, *arguments, part=1024)
    is_done = made[-1]
    assert is_done.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("vocab", [3, 1000, 9001])
def test_every_kind_of_row(vocab, device):
    rows = list(ROWS.values())  # each takes a quarter of a second in the interpreter
    x = logits(len(rows), vocab, device)
    arguments = parameters(rows, device)
    tokens = sample(x, *arguments)
    assert tokens.tolist() == reference.sample(x.cpu(), *[a.cpu() for a in arguments]).tolist()
    assert torch.equal(tokens[-2:], sample(x[-2:], *[a[-2:] for a in arguments]))


def test_a_row_is_drawn_alike_alone_and_beside_others(device):
    rows = [ROWS[name] for name in ("greedy", "plain", "top-k", "top-p", "all")]
    x, arguments = logits(len(rows), 700, device), parameters(rows, device)
    together = sample(x, *arguments)
    alone = [sample(x[i : i + 1], *[a[i : i + 1] for a in arguments]) for i in range(len(rows))]
    assert torch.equal(together, torch.cat(alone))


def test_equal_logits(device):
    """A greedy row takes the first tie. All equals of the k-th largest stay, as do all that top-p reaches at once."""
    kept = {
        (0.0, 0, 1.0, 0.0): {1},
        (1.0, 2, 1.0, 0.0): {1, 3, 6},
        (1.0, 4, 1.0, 0.0): {1, 3, 6, 2, 4, 7, 0},
        (1.0, 0, 0.1, 0.0): {1, 3, 6},
        (1.0, 0, 1.0, 0.1): {1, 3, 6, 0},
    }
    rows = [row for row in kept for _ in range(2)]
    x = torch.tensor([1.0, 3.0, -0.0, 3.0, 0.0, -2.0, 3.0, 0.0], device=device).repeat(len(rows), 1)
    arguments = parameters(rows, device)
    tokens = sample(x, *arguments)
    assert all(token in kept[row] for token, row in zip(tokens.tolist(), rows, strict=True))
    assert torch.equal(tokens.cpu(), reference.sample(x.cpu(), *[a.cpu() for a in arguments]))


def test_an_infinite_score_is_the_token_of_each_row(device):
    """Its token shows the engine that the row has no distribution. Before, such rows gave token 0, and went on."""
    x = logits(len(ROWS), 3000, device)
    x[:, 1500] = float("inf")
    tokens = sample(x, *parameters(list(ROWS.values()), device), part=1024)
    assert tokens.tolist() == [1500] * len(ROWS)


def test_masked_tokens_are_never_drawn(device):
    """Tokens that a grammar masks with -inf are never drawn."""
    x = torch.full((len(ROWS), 5000), float("-inf"), device=device)
    allowed = torch.tensor([7, 4095, 4096, 4999], device=device)
    x[:, allowed] = logits(len(ROWS), 4, device) * 0.1
    tokens = sample(x, *parameters(list(ROWS.values()), device))
    assert set(tokens.tolist()) <= set(allowed.tolist())
    only = torch.full((1, 5000), float("-inf"), device=device)
    only[0, 4097] = -3.0
    assert sample(only, *parameters([ROWS["all"]], device)).tolist() == [4097]


def test_draws_follow_the_distribution(device):
    """In 4,000 draws of a row, each token's share is its probability within five standard deviations."""
    count, probabilities = 4000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    x = probabilities.log().to(device).repeat(count, 1)
    arguments = parameters([ROWS["plain"]] * count, device)
    arguments[4].fill_(42)
    arguments[5].copy_(torch.arange(count))
    expected = reference.sample(x.cpu(), *[a.cpu() for a in arguments])
    shares = expected.bincount(minlength=4) / count
    assert ((shares - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / count).sqrt()).all()
    assert torch.equal(sample(x[:16], *[a[:16] for a in arguments]).cpu(), expected[:16])


def test_uniforms_lie_in_the_unit_interval_and_repeat():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    drawn = torch.stack([reference.uniforms(seeds, torch.full((5,), position)) for position in range(200)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert len(drawn.unique()) == drawn.numel()
    assert torch.equal(drawn[7], reference.uniforms(seeds, torch.full((5,), 7)))


def test_rows_may_be_a_view(device):
    wide = torch.full((3, 1200), float("nan"), device=device)
    wide[:, :1000] = logits(3, 1000, device)
    arguments = parameters([ROWS["plain"], ROWS["greedy"], ROWS["top-p"]], device)
    assert torch.equal(sample(wide[:, :1000], *arguments), sample(wide[:, :1000].contiguous(), *arguments))


def test_no_rows(device):
    assert sample(logits(0, 10, device), *[a[:0] for a in parameters([ROWS["plain"]], device)]).shape == (0,)


def test_bad_arguments_are_named(device):
    x, arguments = logits(2, 10, device), parameters([ROWS["plain"]] * 2, device)
    with pytest.raises(ValueError, match=r"^logits: "):
        sample(x.half(), *arguments)
    with pytest.raises(ValueError, match=r"^top_k: "):
        sample(x, arguments[0], arguments[1].long(), *arguments[2:])
    with pytest.raises(ValueError, match=r"^positions: "):
        sample(x, *arguments[:5], arguments[5][:1])


@pytest.mark.gpu
def test_llama_3_vocabulary(device):
    rows = [row for row in ROWS.values() for _ in range(6)]
    x, arguments = logits(len(rows), 128256, device), parameters(rows, device)
    tokens, expected = sample(x, *arguments).cpu(), reference.sample(x.cpu(), *[a.cpu() for a in arguments])
    # exp in fp32 moves each of 128,256 bounds by about 1e-7 of the total, so an occasional draw falls between.
    assert (tokens != expected).sum() <= 1
