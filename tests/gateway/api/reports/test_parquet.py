"""Parquet files against a reader of another make, and without it against the marks of the format."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.api.reports.parquet import Field, ParquetWriter

FIELDS = (
    Field("tenant", "text"),
    Field("key", "text", optional=True),
    Field("requests", "integer"),
    Field("version", "integer", optional=True),
    Field("cost", "money"),
    Field("day", "time"),
    Field("hour", "time", optional=True),
    Field("deleted", "flag"),
    # More columns than a short list of Thrift has.
    *(Field(f"more_{i}", "integer") for i in range(12)),
)
START = datetime(2026, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)


def rows(number: int) -> list[dict[str, Any]]:
    return [
        {
            "tenant": f"tenant {i} äöü \U0001f680",
            "key": None if i % 3 else f"key {i}",
            "requests": i * 2**40,
            "version": i if 10 <= i < 40 else None,
            "cost": 1_000_001 * i,
            "day": START + timedelta(days=i),
            "hour": None,
            "deleted": i % 7 == 0,
            **{f"more_{n}": -n * i for n in range(12)},
        }
        for i in range(number)
    ]


def written(parts: list[int]) -> bytes:
    """Return a file with a row group of each size."""
    writer, every, out = ParquetWriter(FIELDS), rows(sum(parts)), b""
    out += writer.begin()
    for number in parts:
        out += writer.rows(every[:number])
        every = every[number:]
    return out + writer.end()


@pytest.mark.parametrize("parts", [[1], [50, 17], [8] * 20, [], [0]], ids=str)
def test_another_reader_finds_what_was_written(parts: list[int], tmp_path: Any):
    arro3 = pytest.importorskip("arro3.io", reason="reads Parquet")
    path = tmp_path / "usage.parquet"
    path.write_bytes(written(parts))
    table = arro3.read_parquet(str(path)).read_all()
    assert table.num_rows == sum(parts)
    assert [field.name for field in table.schema] == [field.name for field in FIELDS]
    types = {field.name: str(field.type) for field in table.schema}
    assert "Decimal128(18, 6)" in types["cost"]
    assert "µs" in types["day"]
    assert "UTC" in types["day"]
    found = {name: [value.as_py() for value in table[name]] for name in table.column_names}
    for i, row in enumerate(rows(sum(parts))):
        for name, value in row.items():
            got = found[name][i]
            if name == "cost":
                assert int(got.scaleb(6)) == value
            else:
                assert got == value, (name, i)


def test_the_file_has_the_marks_of_the_format():
    file = written([3])
    assert file[:4] == file[-4:] == b"PAR1"
    assert int.from_bytes(file[-8:-4], "little") < len(file) - 12
