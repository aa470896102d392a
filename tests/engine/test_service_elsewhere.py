"""An engine forgives service elsewhere after a while, also if no gateway reports any more."""

from pathlib import Path

import pytest

from engine.scheduling.request import NewRequest, SamplingParams
from testing.tiny_engines import engine_maker, save_base_and_adapters


def test_a_tenant_gets_a_place_although_its_reports_have_stopped(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.scheduling.policies.tenants.ELSEWHERE_WAIT_S", 0.01)
    make = engine_maker(save_base_and_adapters(tmp_path, 256, ranks=()), request, device="cpu", dtype="float32")
    engine, _ = make(max_num_seqs=1, kv_cache_memory=1 << 20, adapter_memory=1 << 20, preempt_after=0.0)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    engine.add_request(NewRequest("long", [3, 4, 5], params, tenant_id="here"))
    for _ in range(3):
        engine.step()
    engine.add_request(NewRequest("late", [3, 4, 6], params, tenant_id="spread"))
    assert engine.add_service_elsewhere({"spread": 1e9}) == 1
    first: dict[str, bool] = {}
    while "late" not in first:
        for output in engine.step():
            first.setdefault(output.request_id, True)
            assert (output.request_id, output.finish_reason) != ("long", "length")
