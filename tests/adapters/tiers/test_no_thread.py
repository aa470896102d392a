"""A system that starts no further thread: a load and a grammar fail, and the next ones do not."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from adapters import fair_threads
from adapters.tiers.host_cache import HostCache
from engine.core.grammars import Grammars
from engine.errors import QueueFull
from engine.structured.compiler import Grammar
from wire.structured import GrammarSpec

TIMEOUT = 60


@contextmanager
def no_threads() -> Iterator[None]:
    """Let the system start no thread, as at a container's limit of processes."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_threads, "start_new_thread", refuse)
        yield


def test_a_load_is_tried_again(host: HostCache, adapter: Callable[..., str]):
    digest = adapter()
    with no_threads():
        asked = host.fetch(digest, "a")
        assert isinstance(asked.exception(TIMEOUT), OSError)
        host.stop_waiting(digest, "a", asked)
    assert host.fetch(digest).result(TIMEOUT).digest == digest
    deadline = time.monotonic() + TIMEOUT
    while host._loads or host._askers:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_load_without_a_thread_leaves_nothing_behind(host: HostCache, adapter: Callable[..., str]):
    digest = adapter()
    with no_threads():
        asked = [host.fetch(digest, tenant_id) for tenant_id in "ab"]
        for tenant_id, load in zip("ab", asked, strict=True):
            host.stop_waiting(digest, tenant_id, load)
    assert not host._loads
    assert not host._askers


async def test_a_grammar_can_be_sent_again():
    class Compiler:
        def compile(self, spec: GrammarSpec) -> Grammar:
            return Grammar(None, frozenset(), spec.param)  # type: ignore[arg-type]

    grammars, spec = Grammars(Compiler()), GrammarSpec("regex", "a", param="p")  # type: ignore[arg-type]
    with no_threads(), pytest.raises(QueueFull, match="no further thread") as refused:
        await grammars.get(spec)
    assert refused.value.retry_after == 1
    assert (await grammars.get(spec)).param == "p"
    grammars.close()
