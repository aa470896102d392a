"""Penalties and masks in Triton against `kernels.reference`."""

import pytest
import torch

from kernels import reference
from kernels.gpu import logit_edits
from kernels.reference import IN_PROMPT


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab", [50, 5000])
def test_penalties(vocab, device):
    logits = randn(4, vocab).to(device)
    logits[1, ::7] = float("-inf")
    counts = (randn(6, vocab, seed=1) * 2).int().clamp_(min=0)
    counts[:, ::3] += IN_PROMPT
    rows, seats = torch.tensor([3, 1, 0]), torch.tensor([5, 0, 2])
    penalties = torch.tensor([[1.3, 1.0, 0.7], [0.5, 0.0, -0.2], [0.1, 0.4, 0.0]])
    arguments = [argument.to(device) for argument in (rows, seats, counts, penalties)]
    expected = logits.clone()
    reference.penalise(expected, *arguments)
    logit_edits.penalise(logits, *arguments)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("vocab", [33, 5000])
def test_masks(vocab, device):
    logits = randn(4, vocab).to(device)
    words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, words), generator=torch.Generator().manual_seed(1)).int().to(device)
    rows, expected = torch.tensor([2, 0], device=device), logits.clone()
    reference.forbid(expected, rows, bits)
    logit_edits.forbid(logits, rows, bits)
    assert torch.equal(logits, expected)
    assert logits[0].isinf().any()
    assert not logits[[1, 3]].isinf().any()


def test_bad_arguments_are_named(device):
    logits, rows = randn(2, 40).to(device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^bits: "):
        logit_edits.forbid(logits, rows, torch.zeros(1, 1, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"^counts: "):
        logit_edits.penalise(logits, rows, rows, torch.zeros(1, 40, device=device), torch.zeros(3, 1, device=device))
    with pytest.raises(ValueError, match=r"^logits: "):
        logit_edits.forbid(logits.half(), rows, torch.zeros(1, 2, dtype=torch.int32, device=device))
