"""Start, refusal to start, failure and stop of `loraplex up`."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from testing.ports import free_port
from testing.stack import Answer, Stack, Tenant, children, data_dir, http, loraplex, one_line_error
from testing.tiny import save_model


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = loraplex("up", "--demo", "--port", str(port), "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 1
    assert f"port {port}" in one_line_error(done)
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_a_model_folder_that_is_none(what: str, tmp_path: Path):
    model = tmp_path / "no-such-model"
    if what == "empty":
        model.mkdir()
    elif what == "file":
        model.write_text("")
    done = loraplex("up", "--model", str(model), "--port", str(free_port()), "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 1
    assert str(model) in one_line_error(done)


def test_neither_model_nor_demo(tmp_path: Path):
    done = loraplex("up", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2
    assert "--model" in one_line_error(done)


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_gone(pids: list[int]) -> None:
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def requests_of(tenant: Tenant, model: str) -> int:
    """Return the requests in the usage rows, of this run and earlier ones."""
    rows = http("GET", f"{tenant.url}/v1/usage", tenant.key).json["data"]
    return sum(row["requests"] for row in rows if row["model"] == model)


def child(stack: Stack, program: bytes) -> int:
    """Return the process of `loraplex engine` or `loraplex gateway`."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children(stack.process.pid)}
    [pid] = [pid for pid, words in lines.items() if program in words]
    return pid


def replies_while_the_engine_is_away(stack: Stack, ask: Callable[[], Answer]) -> list[Answer]:
    """Kill the engine, ask until it serves again, and return the replies that were no answers, at least two.

    The engine is killed again if this process stalled until it was back.
    """
    for kills in (1, 2, 3):
        away: list[Answer] = []
        os.kill(child(stack, b"engine"), signal.SIGKILL)
        deadline = time.monotonic() + 120
        while stack.text().count("engine serves again") < kills:
            reply = ask()
            away += [reply] if reply.status != 200 else []
            assert time.monotonic() < deadline, stack.text()
            time.sleep(0.1)
        if len(away) > 1:
            return away
    raise AssertionError(f"the engine was never away for two requests: {stack.text()}")


def test_a_second_run_keeps_everything_and_ctrl_c_leaves_nothing(tmp_path: Path):
    data = data_dir(tmp_path)
    first = Stack(data, "--demo")
    try:
        demo = first.wait_ready().demo
        pids = children(first.process.pid)
        acme = Tenant("acme", demo["tenants"][0]["api_key"], tuple(demo["tenants"][0]["models"]), demo["gateway"])
        answer = acme.ask("pirate", "Why is the sky blue?")
        # A killed engine is restarted; the gateway answers with a retry time in the meantime.
        body = json.dumps({"model": "pirate", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]})
        ask = partial(http, "POST", f"{acme.url}/v1/chat/completions", acme.key, body.encode())
        away = replies_while_the_engine_is_away(first, ask)
        assert "engine was killed by SIGKILL; it starts again in 1 s" in first.text()
        # The first request may have been sent before the gateway learned of the failure.
        assert away[0].status in (502, 503)
        assert {reply.status for reply in away[1:]} == {503}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in away[1:])
        wait_for(lambda: ask().status == 200)
        before = requests_of(acme, "pirate")
        pids += children(first.process.pid)
        # A failure of another part stops all parts in order, and is reported.
        os.kill(child(first, b"gateway"), signal.SIGKILL)
        assert first.process.wait(60) == 1
        assert "Error: gateway was killed by SIGKILL; its log is" in first.text()
        assert "Traceback" not in first.text()
        wait_gone(pids)
    finally:
        first.stop()

    second = Stack(data, "--demo")
    try:
        again = second.wait_ready().demo
        assert again["tenants"] == demo["tenants"]
        assert again["admin_key"] == demo["admin_key"]
        acme = Tenant("acme", acme.key, acme.models, again["gateway"])
        assert acme.ask("pirate", "Why is the sky blue?") == answer
        wait_for(lambda: requests_of(acme, "pirate") > before)
        assert [a["version"] for a in http("GET", f"{acme.url}/v1/adapters", acme.key).json["data"]] == [1, 1]
        pids = children(second.process.pid)
        assert len(pids) == 3
        assert second.stop(signal.SIGINT) == 0
        assert "  gateway: waits for running answers to end\n" in second.text()
        assert second.text().rstrip().endswith("Stopped")
        wait_gone(pids)
    finally:
        second.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_while_starting_it_leaves_nothing(number: int, tmp_path: Path):
    stack = Stack(data_dir(tmp_path), "--demo")
    try:
        deadline = time.monotonic() + 60
        while not (pids := children(stack.process.pid)):
            assert stack.process.poll() is None, stack.text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert stack.stop(number) == (-number if number == signal.SIGKILL else 0)
        assert "Traceback" not in stack.text()
        wait_gone(pids)
    finally:
        stack.stop()


def cpus_of(stack: Stack) -> dict[int, frozenset[int]]:
    """Return the CPUs that each engine may use, by process."""
    pids = [pid for pid in children(stack.process.pid) if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return {pid: frozenset(os.sched_getaffinity(pid)) for pid in pids}


def engines_of(gateway: str, admin_key: str) -> list[dict]:
    return http("GET", f"{gateway}/admin/api/engines", admin_key).json["data"]


def check_each_answers(gateway: str, admin_key: str, ask: Callable[[], int]) -> None:
    """Check that each engine answers while the others are drained. At the end the gateway uses all of them."""
    engines = engines_of(gateway, admin_key)
    for engine in engines:
        others = [json.dumps({"url": e["url"]}).encode() for e in engines if e is not engine]
        for other in others:
            assert http("POST", f"{gateway}/admin/api/engines/drain", admin_key, other).status == 200
        # The gateway notices a moment later that this engine serves again.
        wait_for(lambda: ask() == 200)
        for other in others:
            assert http("POST", f"{gateway}/admin/api/engines/resume", admin_key, other).status == 200
    wait_for(lambda: not any(engine["reason"] for engine in engines_of(gateway, admin_key)))


def check_that_an_engine_returns_to_its_cpus(stack: Stack, ask: Callable[[], int]) -> None:
    """Kill an engine of two: the other answers meanwhile, and the new one has the same CPUs."""
    before = cpus_of(stack)
    shares = list(before.values())
    assert len(shares) == 2
    assert all(shares)
    if os.cpu_count() != 1:
        assert not shares[0] & shares[1]
    dead = max(before)
    os.kill(dead, signal.SIGKILL)
    statuses = []
    deadline = time.monotonic() + 120
    while "serves again" not in stack.text():
        statuses.append(ask())
        assert time.monotonic() < deadline, stack.text()
        time.sleep(0.02)
    assert statuses.count(200) >= len(statuses) - 1, statuses  # one may have been sent to the dead engine
    after = cpus_of(stack)
    [new] = after.keys() - before.keys()
    assert (after.keys() & before.keys(), after[new]) == (before.keys() - {dead}, before[dead])


def usage_rows(*flags: str) -> list[dict]:
    done = loraplex("usage", "--tenant", "solo", "--json", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["data"]


def test_a_model_by_folder_without_the_demo(tmp_path: Path):
    """`--model PATH` serves the folder under its own name, without tenants until one is created; on two engines."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_model(folder)
    plain = Stack(data_dir(tmp_path), "--model", str(folder), "--engines", "2", "--engine-args", "--max-num-seqs 7")
    try:
        plain.wait_ready()
        assert not (tmp_path / "demo.json").exists()
        local = json.loads((tmp_path / "local.json").read_text())
        place = (local["gateway"], local["admin_key"])
        # The gateway is ready with one engine; it learns of the other a moment later.
        wait_for(lambda: [e["healthy"] for e in engines_of(*place)] == [True] * 2)
        assert [e["state"]["max_num_seqs"] for e in engines_of(*place)] == [7] * 2
        flags = ("--data-dir", str(tmp_path))
        assert loraplex("tenant", "create", "solo", *flags).returncode == 0
        key = loraplex("key", "create", "solo", *flags).stdout.strip()
        asked = loraplex("chat", "Say hi.", *flags, "--api-key", key)
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.strip()
        wait_for(lambda: usage_rows(*flags))  # the ledger is written in batches
        assert [row["tenant"] for row in usage_rows(*flags)] == ["solo"]
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
        ask = partial(http, "POST", f"{local['gateway']}/v1/completions", key, body)
        check_each_answers(*place, lambda: ask().status)
        check_that_an_engine_returns_to_its_cpus(plain, lambda: ask().status)
        check_each_answers(*place, lambda: ask().status)
        assert plain.stop(signal.SIGTERM) == 0
    finally:
        plain.stop()
