"""Runs a plan: batch, forward pass, next tokens. Owns the KV cache's tensors; knows no queues."""

import torch

from adapters.device_pool import AdapterPool
from engine.model.batch import build_batch, logits_rows
from engine.model.llama import Decoder
from engine.model.sampler import sample, token_logprobs
from engine.scheduling.request import Request
from kernels.backend import KvCache
from kernels.memory import lazy_zeros


class Runner:
    """num_blocks blocks of block_size tokens in every layer, in the decoder's dtype and on its device."""

    def __init__(
        self,
        decoder: Decoder,
        adapters: AdapterPool,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        c = decoder.config
        self.decoder, self.block_size, self.device = decoder, block_size, device
        shape = (num_blocks, c.num_kv_heads, block_size, c.head_dim)
        kv = [KvCache(lazy_zeros(shape, dtype, device), lazy_zeros(shape, dtype, device)) for _ in range(c.num_layers)]
        decoder.attach(kv, adapters)

    @torch.inference_mode()
    def run(self, plan: dict[Request, int]) -> dict[Request, int]:
        """Computes the plan's tokens; returns the next token of each request whose tokens are then all computed."""
        batch = build_batch(plan, self.block_size, self.device)
        logits = self.decoder.forward(batch)
        last_rows: list[int] = []
        finished: list[Request] = []
        at = 0
        for request, n in plan.items():
            rows = len(logits_rows(request, n, 0))
            if request.wants_prompt_logprobs:
                self._take_prompt_logprobs(request, n, logits[at : at + rows])
            at += rows
            if request.num_computed + n == request.num_tokens:
                last_rows.append(at - 1)
                finished.append(request)
        if not finished:
            return {}
        if len(last_rows) != len(logits):
            logits = logits[last_rows]
        wanted = [i for i, r in enumerate(finished) if r.params.logprobs is not None]
        raw = logits[wanted].clone() if wanted else None  # as the model gave them, before penalties
        tokens = sample(logits, finished)
        if raw is not None:
            chosen = [tokens[i] for i in wanted]
            top = [finished[i].params.logprobs or 0 for i in wanted]
            for i, entry in zip(wanted, token_logprobs(raw, chosen, top), strict=True):
                finished[i].logprobs.append(entry)
        return dict(zip(finished, tokens, strict=True))

    def _take_prompt_logprobs(self, request: Request, n: int, logits: torch.Tensor) -> None:
        first = request.num_computed
        if first == 0:
            request.prompt_logprobs = [None]  # nothing predicts the first token
        following = request.token_ids[first + 1 : min(first + n + 1, request.num_prompt_tokens)]
        if following:
            top = [request.params.prompt_logprobs or 0] * len(following)
            request.prompt_logprobs += token_logprobs(logits[: len(following)], following, top)
