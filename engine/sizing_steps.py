"""Times of an engine's steps on this machine's CPU, measured before the engine exists.

The engine's own decoder and sampler run steps of the expected sizes, with enough of the model's layers that no cache
holds them. Each further layer takes as long as a measured one. Rooflines and measured products left an error of up to a
half (docs/lab-notes.md), because attention, norms and the wake-up of threads are not in them.
"""

import copy
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.execution.no_adapters import NoAdapters
from engine.execution.runner import Runner, RunnerLimits
from engine.execution.warmup import GREEDY
from engine.model.decoder import Decoder
from engine.scheduling.plan import Plan
from engine.scheduling.request import NewRequest, Request
from kernels.memory import HugePages, lazy_zeros
from kernels.ops import LAYER_TENSORS, DecoderWeights, LayerWeights
from kernels.weights import LinearWeights

CPU = torch.device("cpu")
# Bytes of the layers that are made, and of a step's keys and values: more than the caches of most processors hold.
LAYER_BYTES = 256 << 20
# Runs of each step, and the time after which no further one begins. Their median counts: the shortest is what an engine
# rarely reaches, and the first are slow, because threads and the processor's clock wake up.
RUNS, MAX_S = 40, 0.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """A step's sizes: tokens of each decode's context, number of decodes, tokens of each prompt."""

    context: int
    decodes: int
    prompts: tuple[int, ...]


class MeasuredSteps:
    """Steps of a model that is loaded without memory."""

    def __init__(self, decoder: Decoder, block_size: int, most_tokens: int, kv_dtype: torch.dtype) -> None:
        """decoder: on torch's `meta` device, with the ops of this CPU. most_tokens: maximum tokens of a step; longer
        prompts are computed in several steps.
        """
        layers = decoder.weights.layers
        each = sum(matrix.num_bytes for matrix in _matrices(layers[0]))
        self._num_layers, self._most = len(layers), min(len(layers), max(2, LAYER_BYTES // each))
        model = decoder.config
        self._kv_bytes = 2 * model.num_kv_heads * model.head_dim * kv_dtype.itemsize  # of a token, in a layer
        self._decoder = copy.copy(decoder)
        self._weights = _made(decoder.weights, self._most)
        self._block_size, self._most_tokens, self._kv_dtype = block_size, most_tokens, kv_dtype

    def seconds(self, sizes: Sizes) -> float:
        """Return the time of a step, or of the steps of a prompt that does not fit into one."""
        tokens = sizes.decodes * sizes.context + sum(sizes.prompts)
        number = min(self._most, max(2, LAYER_BYTES // (tokens * self._kv_bytes)))
        most = self._median(number, sizes)
        if number == self._num_layers:
            return most
        one = self._median(1, sizes)
        return one + (most - one) * (self._num_layers - 1) / (number - 1)

    def _median(self, num_layers: int, sizes: Sizes) -> float:
        """Return the median time with the first `num_layers` layers."""
        decoder = self._decoder
        decoder.config = replace(decoder.config, num_layers=num_layers)
        decoder.weights = replace(self._weights, layers=self._weights.layers[:num_layers])
        requests = self._requests(sizes)
        limits = RunnerLimits(
            num_blocks=sum(len(request.blocks) for request in requests),
            block_size=self._block_size,
            max_num_seqs=len(requests),
            max_model_len=max(len(request.blocks) for request in requests) * self._block_size,
            kv_dtype=self._kv_dtype,
        )
        runner = Runner(decoder, NoAdapters(num_layers), limits, CPU)
        for cache in decoder.kv:
            for part in cache:
                if part is not None:
                    part.view(torch.uint8).fill_(1)  # zeros would share one page
        times: list[float] = []
        while len(times) < RUNS and sum(times) < MAX_S:
            times.append(self._time(runner, self._requests(sizes)))
        runner.close()
        return statistics.median(times)

    def _time(self, runner: Runner, requests: list[Request]) -> float:
        """Return the time until all requests have a token."""
        seconds = 0.0
        while requests:
            plan, room = Plan(), self._most_tokens
            for request in requests:
                plan[request] = min(request.num_to_compute, room)
                room -= plan[request]
                if not room:
                    break
            began = time.perf_counter()
            runner.sample(runner.forward(plan)).wait()
            seconds += time.perf_counter() - began
            for request, number in plan.items():
                request.num_computed += number
            requests = [request for request in requests if request.num_to_compute]
        return seconds

    def _requests(self, sizes: Sizes) -> list[Request]:
        requests, first = list[Request](), 0
        for seat, prompt in enumerate((*[0] * sizes.decodes, *sizes.prompts)):
            tokens = [0] * (prompt or sizes.context)
            request = Request(NewRequest(str(seat), tokens, GREEDY))
            request.start(0)
            if not prompt:  # a decode: its last token is an output
                request.token_ids.append(0)
                request.num_computed = sizes.context
            request.seat = seat
            end = first + math.ceil(request.num_tokens / self._block_size)
            request.blocks = list(range(first, end))
            first = end
            requests.append(request)
        return requests


def _matrices(layer: LayerWeights) -> tuple[LinearWeights, ...]:
    return layer.qkv, layer.o, layer.gate_up, layer.down


def _made(weights: DecoderWeights, num_layers: int) -> DecoderWeights:
    """Return the first layers, the embedding and the head in memory on huge pages, as an engine has them."""
    memory = HugePages()

    def tensor(like: Tensor) -> Tensor:
        return memory.empty(like.numel(), like.dtype).view(like.shape).fill_(1)  # zeros would share one page

    def matrix(like: LinearWeights) -> LinearWeights:
        tensors = {name: tensor(value) for name, value in like.tensors.items()}
        return LinearWeights(like.scheme, tensors, like.in_features, like.out_features)

    def table(like: Tensor) -> Tensor:
        return lazy_zeros(like.shape, like.dtype)  # steps read few of its rows

    head, embedding = matrix(weights.lm_head), weights.embedding
    if embedding is weights.lm_head:
        embedding = head
    else:
        tensors = {name: table(value) for name, value in embedding.tensors.items()}
        embedding = LinearWeights(embedding.scheme, tensors, embedding.in_features, embedding.out_features)
    tables = {id(layer.cos_sin): table(layer.cos_sin) for layer in weights.layers[:num_layers]}
    layers = []
    for layer in weights.layers[:num_layers]:
        made: dict[str, Any] = {name: matrix(getattr(layer, name)) for name in ("qkv", "o", "gate_up", "down")}
        for name in LAYER_TENSORS:
            value = getattr(layer, name)
            made[name] = None if value is None else tables[id(value)] if name == "cos_sin" else tensor(value)
        layers.append(replace(layer, **made))
    return replace(weights, embedding=embedding, layers=layers, norm=tensor(weights.norm), lm_head=head)
