"""The sweep's steps on a tiny model. Its figures mean nothing here."""

from pathlib import Path

import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from benchmarks.sweep import Bench, make_adapters
from engine.scheduling.plan import Plan
from testing.tiny import save_model


def test_steps_have_all_streams_with_their_contexts_and_adapters(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(model)
    base = BaseShape.from_config_dir(model)
    host = HostCache(None, base, 1 << 24, torch.bfloat16)
    digests = [host.add_path(path) for path in make_adapters(base, tmp_path, 2, 8)]
    bench = Bench(model, host, 1 << 26)
    forward, plans = bench.engine.runner.forward, list[list[tuple[int, str | None]]]()

    def record(plan: Plan) -> object:
        plans.append([(request.num_computed, request.adapter_digest) for request in plan])
        return forward(plan)

    bench.engine.runner.forward = record  # type: ignore[method-assign]
    for adapters in ([], digests):
        plans.clear()
        assert bench.decode_ms(3, 20, adapters) > 0
        first, second, third = plans[-1]
        assert first[0] == second[0] == third[0] > 20
        assert [first[1], second[1], third[1]] == ([*adapters, adapters[0]] if adapters else [None] * 3)
    bench.engine.close()
    host.close()
