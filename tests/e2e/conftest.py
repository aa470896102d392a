"""The running stack that these tests share. Tests that stop or break a stack start their own."""

from collections.abc import Iterator

import pytest

from testing.stack import Stack, Tenant, close_clients, data_dir


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.integration)
            # The first test waits until the model is downloaded and the stack has started.
            item.add_marker(pytest.mark.timeout(420))


_shared: list[Stack] = []


# The idle stack would take time from the session's other tests.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Stop the shared stack after the last test of this folder."""
    try:
        return (yield)
    finally:
        if _shared and (nextitem is None or "/e2e/" not in str(nextitem.path)):
            _shared.pop().stop()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    _shared.append(Stack(data_dir(tmp_path_factory.mktemp("stack")), "--demo"))
    try:
        yield _shared[-1].wait_ready()
    finally:
        # Still running if the session ended early, by `-x` or Ctrl-C.
        while _shared:
            _shared.pop().stop()


@pytest.fixture(scope="session", autouse=True)
def _clients() -> Iterator[None]:
    yield
    close_clients()


@pytest.fixture(scope="session")
def demo(stack: Stack) -> dict:
    return stack.demo


@pytest.fixture(scope="session")
def tenants(demo: dict) -> dict[str, Tenant]:
    return {t["name"]: Tenant(t["name"], t["api_key"], tuple(t["models"]), demo["gateway"]) for t in demo["tenants"]}


@pytest.fixture(scope="session")
def acme(tenants: dict[str, Tenant]) -> Tenant:
    return tenants["acme"]


@pytest.fixture(scope="session")
def globex(tenants: dict[str, Tenant]) -> Tenant:
    return tenants["globex"]
