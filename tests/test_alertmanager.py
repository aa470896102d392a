"""Alertmanager's example configuration in a real server: receivers by severity, muted warnings, secrets in files."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from testing.gateway.running import until
from testing.ports import free_port
from testing.serving import serving
from tests.test_deploy import ALERTS, DEPLOY

CONFIG = DEPLOY / "alertmanager.yml"
TOKEN = "the-pager's-token"


class Alertmanager:
    """A server of its own with the example's configuration. paged: bearer token and body of each webhook's call."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.paged: list[tuple[str, dict[str, Any]]] = []
        self._session = session

    async def fire(self, *alerts: dict[str, str]) -> None:
        """Send alerts as Prometheus does. An alert has the labels of its rule and those given with its name."""
        body = [{"labels": ALERTS[alert["alertname"]]["labels"] | alert} for alert in alerts]
        async with self._session.post(f"{self.url}/api/v2/alerts", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def shown(self, query: str = "") -> list[dict[str, Any]]:
        async with self._session.get(f"{self.url}/api/v2/alerts{query}") as answer:
            return await answer.json()

    async def names(self, query: str) -> list[tuple[str, str]]:
        """Return name and disk of the shown alerts."""
        return sorted((each["labels"]["alertname"], each["labels"].get("disk", "")) for each in await self.shown(query))

    async def is_up(self) -> bool:
        try:
            return await self.shown() == []
        except aiohttp.ClientError:
            return False


def own_copy(folder: Path, pager: str) -> Path:
    """Write the configuration with this machine's addresses and files, and without a wait before a page."""
    text = (
        CONFIG.read_text()
        .replace("/etc/alertmanager/secrets", str(folder))
        .replace("group_wait: 10s", "group_wait: 0s")
    )
    text = text.replace("https://pager.example.com", pager).replace("smtp.example.com:587", "127.0.0.1:1")
    (folder / "pager-token").write_text(TOKEN)
    (folder / "smtp-password").write_text("unused")
    (folder / "alertmanager.yml").write_text(text)
    return folder / "alertmanager.yml"


@pytest.fixture
async def alertmanager(starts_servers: None, tmp_path: Path) -> AsyncIterator[Alertmanager]:
    program = shutil.which("prometheus-alertmanager")
    if program is None:
        pytest.skip("Alertmanager is not installed: `apt-get install prometheus-alertmanager`")
    address = f"127.0.0.1:{free_port()}"
    async with aiohttp.ClientSession() as session:
        server = Alertmanager(f"http://{address}", session)

        async def page(request: web.Request) -> web.Response:
            server.paged.append((request.headers.get("Authorization", ""), await request.json()))
            return web.Response()

        app = web.Application()
        app.router.add_post("/loraplex", page)
        async with serving(app) as pager:
            config = own_copy(tmp_path, pager)
            flags = (f"--config.file={config}", f"--storage.path={tmp_path / 'data'}", "--cluster.listen-address=")
            silent = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
            process = await asyncio.create_subprocess_exec(program, *flags, f"--web.listen-address={address}", **silent)
            try:
                await until(server.is_up)
                yield server
            finally:
                process.terminate()
                await asyncio.wait_for(process.wait(), 20)


async def test_each_severity_has_its_receiver(alertmanager: Alertmanager):
    await alertmanager.fire(*({"alertname": name} for name in ALERTS))
    receivers = {"critical": ["page"], "warning": ["mail"], "info": ["nobody"]}
    shown = {
        each["labels"]["alertname"]: [to["name"] for to in each["receivers"]] for each in await alertmanager.shown()
    }
    assert shown == {name: receivers[rule["labels"]["severity"]] for name, rule in ALERTS.items()}


async def test_a_page_has_the_token_of_the_file(alertmanager: Alertmanager):
    await alertmanager.fire({"alertname": "RedisAway"}, {"alertname": "RedisSettings"})

    async def is_paged() -> bool:
        return bool(alertmanager.paged)

    await until(is_paged)
    [(token, body)] = alertmanager.paged
    assert token == f"Bearer {TOKEN}"
    assert [alert["labels"]["alertname"] for alert in body["alerts"]] == ["RedisAway"]


async def test_a_critical_alert_mutes_the_warnings_of_its_part(alertmanager: Alertmanager):
    warnings = [{"alertname": "DiskFilling", "disk": "journal"}, {"alertname": "DiskFilling", "disk": "adapter_store"}]
    warnings += [{"alertname": name} for name in ("KvCacheFull", "QueueLong", "LedgerRejects", "QuotaRefusalsHigh")]
    await alertmanager.fire(*warnings, {"alertname": "BudgetExhausted"})
    assert await alertmanager.names("?inhibited=true&active=false") == []
    await alertmanager.fire({"alertname": "DiskFull", "disk": "journal"}, {"alertname": "EngineDown", "engine": "a"})
    muted = [("DiskFilling", "journal"), ("KvCacheFull", ""), ("QueueLong", "")]

    async def are_muted() -> bool:
        return await alertmanager.names("?inhibited=true&active=false&unprocessed=false") == muted

    await until(are_muted)


def names_in(value: Any) -> Iterator[str]:
    """Return the names of all fields, at every depth."""
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from names_in(each)


def test_secrets_are_files():
    secrets = {name for name in names_in(yaml.safe_load(CONFIG.read_text())) if "password" in name or "cred" in name}
    assert secrets == {"smtp_auth_password_file", "credentials_file"}
