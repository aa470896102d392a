"""Tables of a model that is served without adapters: a draft model."""

import torch
from torch import Tensor

from kernels.ops import EmbeddingLora, HeadLora
from kernels.reference import LoraGroup


class NoAdapters:
    """`kernels.ops.LoraTables` without slots and pages."""

    page_rank = 0

    def __init__(self, num_layers: int) -> None:
        self.groups: list[dict[str, LoraGroup]] = [{} for _ in range(num_layers)]
        self.embeddings: dict[int, EmbeddingLora] = {}
        self.heads: dict[int, HeadLora] = {}
        self.slot_digests: list[str] = []
        self.page_table: Tensor = torch.empty(0, dtype=torch.int32)
        self.ranks: Tensor = torch.empty(0, dtype=torch.int32)
