"""`benchmarks.residency`: vLLM's command, the load that both servers get, and the phases of a cycle."""

import argparse
import asyncio
import itertools
import time
from pathlib import Path

import pytest

from benchmarks.adapter_engine import Stream
from benchmarks.against_vllm import vllm, vllm_command
from benchmarks.residency import AT_ONCE, Cycle, Planned, send_all, tokens_until


def test_the_device_of_vllm_holds_fewer_adapters_than_its_host_memory() -> None:
    adapters = {f"sha256:{i}": Path(f"/adapters/{i}") for i in range(64)}
    command, _ = vllm(Path("/venv/bin/vllm"), Path("/model"), adapters, 8000, on_device=8)
    flags = dict(itertools.pairwise(command))
    assert (flags["--max-loras"], flags["--max-cpu-loras"]) == ("8", "64")
    named = command[command.index("--lora-modules") + 1 :]
    assert named == [f"sha256:{i}=/adapters/{i}" for i in range(64)]
    everything, _ = vllm(Path("/venv/bin/vllm"), Path("/model"), adapters, 8000)
    assert everything[everything.index("--max-loras") + 1] == "64"


def test_the_vllm_command_may_be_named_by_its_virtual_environment(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.touch()
    assert vllm_command(str(tmp_path)) == vllm_command(str(command)) == command
    for wrong in (tmp_path / "nothing", tmp_path / "bin"):
        with pytest.raises(argparse.ArgumentTypeError):
            vllm_command(str(wrong))


def test_a_delivery_of_several_tokens_counts_for_its_part_of_the_answer() -> None:
    single, double = Stream("t", "a", 0.0, [1.0, 2.0, 3.0, 4.0]), Stream("t", "a", 0.0, [2.0, 4.0])
    for stream in (single, double):
        assert [tokens_until(end, 4, stream) for end in (0.5, 2.0, 4.0)] == [0, 2, 4]


class Server:
    """A server that delivers a token every 0.02 s, and notes the requests that run at once."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.tenants: list[str] = []
        self.running = self.most_running = 0

    async def state(self) -> dict[str, int]:
        return {"adapter_loads": 0}

    async def stream(self, tenant: str, digest: str, prompt: list[int], tokens: int) -> Stream:
        self.prompts.append(prompt)
        self.tenants.append(tenant)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        stream = Stream(tenant, digest, time.perf_counter())
        for _ in range(tokens):
            await asyncio.sleep(0.02)
            stream.token_times.append(time.perf_counter())
        self.running -= 1
        return stream


async def test_requests_are_sent_in_order_and_the_rate_excludes_the_end() -> None:
    """The last request is 20 times as long as the others. The tokens that it gets alone are not in the rate."""
    requests = [Planned("t", "a", [i], 2) for i in range(2 * AT_ONCE)] + [Planned("t", "a", [2 * AT_ONCE], 40)]
    server = Server()
    rate, streams = await send_all(server, requests)  # type: ignore[arg-type]
    assert server.prompts == [one.prompt for one in requests]
    assert server.most_running == AT_ONCE
    assert len(streams) == len(requests)
    whole = sum(one.tokens for one in requests) / (max(s.end for s in streams) - min(s.sent for s in streams))
    assert rate > 2 * whole


async def test_the_other_tenant_of_a_cycle_sends_as_often_as_asked() -> None:
    """Without a gap its 16 streams send as fast as they are answered."""
    counts = []
    for gap in (0.0, 0.1):
        server, began = Server(), time.perf_counter()
        figures = await Cycle(server, "mine", 0.2, 5.0).phase(["a", "b"], gap)  # type: ignore[arg-type]
        counts.append(server.tenants.count("other"))
        seconds = time.perf_counter() - began
        assert figures["adapters used"] == 2
        assert figures["requests"] == server.tenants.count("neighbour") > 0
        assert 0 < figures["other requests/s"] * (figures["seconds"] + 1) <= counts[-1]
    assert counts[1] <= seconds / 0.1 + 1
    assert counts[1] < counts[0]
