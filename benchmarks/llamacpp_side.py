"""The side of `benchmarks.against_llamacpp` that runs llama.cpp, in a virtual environment with llama-cpp-python.

Imports nothing of this project. It reads lines `decode STREAMS PROMPT STEPS` and `prefill TOKENS` from standard input,
and answers each with a line of seconds: of each decode step, or of the prompt.
"""

import sys
import time
from typing import Any

import llama_cpp
import numpy as np


class Side:
    """A model and its context. Tokens are greedy, as on the other side."""

    def __init__(self, path: str, threads: int, streams: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not model:
            sys.exit(f"llama.cpp cannot load {path}")
        sizes = llama_cpp.llama_context_default_params()
        sizes.n_ctx, sizes.n_seq_max = context * streams, streams
        sizes.n_batch = sizes.n_ubatch = 512
        sizes.n_threads = sizes.n_threads_batch = threads
        self.context: Any = llama_cpp.llama_init_from_model(model, sizes)
        if not self.context:
            sys.exit("llama.cpp cannot create a context")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def run(self, rows: list[tuple[int, int, int]], wanted: list[int]) -> list[int]:
        """Compute rows (token, position, stream). Return the likeliest token after each of the rows `wanted`."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, stream) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = stream, i in wanted
        if llama_cpp.llama_decode(self.context, batch):
            sys.exit("llama.cpp has no room for a batch")
        found = []
        for i in wanted:
            logits = llama_cpp.llama_get_logits_ith(self.context, i)
            found.append(int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()))
        return found

    def prompt(self, stream: int, tokens: list[int]) -> int:
        last = 0
        for first in range(0, len(tokens), 512):
            rows = [(token, first + i, stream) for i, token in enumerate(tokens[first : first + 512])]
            [last] = self.run(rows, [len(rows) - 1])
        return last

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def prefill(self, count: int) -> list[float]:
        self.clear()
        tokens = self.tokens(5, count)
        began = time.perf_counter()
        self.prompt(0, tokens)
        return [time.perf_counter() - began]

    def decode(self, streams: int, prompt: int, steps: int) -> list[float]:
        self.clear()
        newest = [self.prompt(stream, self.tokens(stream, prompt)) for stream in range(streams)]
        seconds = []
        for step in range(steps):
            began = time.perf_counter()
            rows = [(token, prompt + step, stream) for stream, token in enumerate(newest)]
            newest = self.run(rows, list(range(streams)))
            seconds.append(time.perf_counter() - began)
        return seconds

    def tokens(self, seed: int, count: int) -> list[int]:
        return [(31 * seed + 7919 * j) % (self.vocab_size - 100) + 50 for j in range(count)]


def main() -> None:
    path, *sizes = sys.argv[1:]
    side = Side(path, *map(int, sizes))
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        numbers = map(int, arguments)
        seconds = side.prefill(*numbers) if name == "prefill" else side.decode(*numbers)
        print(*seconds, flush=True)


if __name__ == "__main__":
    main()
