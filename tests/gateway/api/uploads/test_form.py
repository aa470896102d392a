"""Forms: the headers of their parts, as clients write them and as attackers do."""

import logging
import warnings
from typing import Any

import aiohttp.multipart
import pytest

from gateway.api.uploads.form import Form, FormError, FormPart
from testing.gateway.running import Gateway


async def part_of(disposition: bytes) -> FormPart | None:
    sent = [b"--b\r\nContent-Disposition: " + disposition + b"\r\n\r\nx\r\n--b--\r\n"]

    async def receive() -> bytes:
        return sent.pop() if sent else b""

    return await Form("b", receive).next()


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        (b'form-data; name="file"', None),
        (b"form-data; name=file; filename=a.zip", "a.zip"),
        (b'form-data; name="file"; filename="a; \\"b\\" \\\\ c.zip"', 'a; "b" \\ c.zip'),
        (b'Form-Data ;Name = "file" ; FileName="a.zip";', "a.zip"),
        (b'form-data; name="file"; filename="C:\\fakepath\\a.zip"', "C:\\fakepath\\a.zip"),
        ('form-data; name="file"; filename="ä.zip"'.encode(), "ä.zip"),
        (b"form-data; name=\"file\"; filename*=UTF-8''%C3%A4.zip", "ä.zip"),
        (b"form-data; name=\"file\"; filename=a.zip; filename*=utf-8'de'b.zip", "a.zip"),
    ],
)
async def test_parts_as_clients_write_them(disposition: bytes, filename: str | None):
    assert await part_of(disposition) == FormPart(name="file", filename=filename)


MALFORMED = [
    b"form-data; name=\"file\"; filename*=nope''\n2026-11-22 INFO gateway.api.access_log forged",
    b"form-data; name=\"file\"; filename*=nope''a",
    b"form-data; name=\"file\"; filename*=utf-8''%0aforged",
    b"form-data; name=\"file\"; filename*=utf-8''%ff",
    b'form-data; name="file"; filename*=utf-8',
    b'form-data; name="file"; filename="\x1b]0;forged\x07"',
    'form-data; name="file"; filename="\x9b2J"'.encode(),
    b'form-data; name="file"; name="other"',
    b'form-data; name="file',
    b'form-data; name="file"; forged',
    b'form-data; name="file" forged',
    b"form-data; name=",
    b'form-data; name=""',
    b'attachment; name="file"',
    b"",
]


@pytest.mark.parametrize("disposition", MALFORMED)
async def test_malformed_headers_are_no_parts(disposition: bytes):
    with pytest.raises(FormError) as refused:
        await part_of(disposition)
    assert "forged" not in str(refused.value)


async def test_malformed_headers_are_refused_and_not_printed(gateway: Gateway, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    acme = await gateway.tenant("acme")
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    registry: Any = vars(aiohttp.multipart).get("__warningregistry__", {})
    kept = len(registry)
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        for disposition in MALFORMED:
            body = b"--b\r\nContent-Disposition: " + disposition + b"\r\n\r\nx\r\n--b--\r\n"
            assert (await acme.call("POST", "/v1/adapters", data=body, headers=headers)).status == 400
    assert [str(each.message) for each in printed if "disposition" in type(each.message).__name__.lower()] == []
    assert len(registry) == kept
    assert "forged" not in caplog.text
