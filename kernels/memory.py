"""Large tables that cost memory only where they have been written."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU the pages come from the system as they are first touched (torch.zeros would touch them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
