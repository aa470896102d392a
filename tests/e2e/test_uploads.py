"""An uploaded adapter serves the next request; an invalid upload is refused with the reason."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.up.demo_tenants import adapters_folder
from testing.stack import Answer, Tenant, http, loraplex

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def multipart(parts: dict[str, bytes]) -> tuple[bytes, str]:
    """Return a form body written by hand, so that the test controls the exact bytes."""
    body = b""
    for name, content in parts.items():
        file = b"" if name == "name" else b'; filename="%s"' % name.encode()
        field = b"file" if name.startswith("bundle.") else name.encode()
        body += b'--BOUNDARY\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (field, file, content)
    return body + b"--BOUNDARY--\r\n", "multipart/form-data; boundary=BOUNDARY"


def push(tenant: Tenant, parts: dict[str, bytes]) -> Answer:
    body, kind = multipart(parts)
    return http("POST", f"{tenant.url}/v1/adapters", tenant.key, body, kind)


def files(adapter: str) -> dict[str, bytes]:
    return {name: (adapters_folder() / adapter / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def zipped(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in content.items():
            info = tarfile.TarInfo(f"adapter/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["files", "zip", "tar.gz"])
def test_an_upload_is_used_at_once(form: str, acme: Tenant, globex: Tenant):
    """globex uploads acme's pirate under its own name, and gets the same answer at once."""
    import openai

    content = files("pirate")
    bundle = {"files": content, "zip": {"bundle.zip": zipped(content)}, "tar.gz": {"bundle.tar.gz": tarred(content)}}
    name = f"sailor-{form.replace('.', '-')}"
    with pytest.raises(openai.NotFoundError):
        globex.ask(name, "Why is the sky blue?")
    made = push(globex, {"name": name.encode()} | bundle[form])
    assert made.status in (200, 201), made.body
    assert globex.ask(name, "Why is the sky blue?") == acme.ask("pirate", "Why is the sky blue?")
    assert name in {row["name"] for row in http("GET", f"{globex.url}/v1/adapters", globex.key).json["data"]}
    assert http("DELETE", f"{globex.url}/v1/adapters/{name}", globex.key).status in (200, 204)
    with pytest.raises(openai.NotFoundError):
        globex.ask(name, "Why is the sky blue?")
    # The content is shared by digest: the deletion of one name must not affect the other.
    assert acme.ask("pirate", "Why is the sky blue?")


def test_new_content_under_an_old_name_is_used_at_once(globex: Tenant, demo: dict):
    assert push(globex, {"name": b"changing"} | files("pirate")).status in (200, 201)
    before = globex.ask("changing", "Why is the sky blue?")
    assert push(globex, {"name": b"changing"} | files("brief")).status in (200, 201)
    assert globex.ask("changing", "Why is the sky blue?") != before
    assert globex.ask("changing", "Why is the sky blue?") == globex.ask("brief", "Why is the sky blue?")


def test_the_command_line_pushes_too(globex: Tenant, demo: dict):
    flags = ("--gateway", globex.url, "--admin-key", demo["admin_key"], "--tenant", "globex")
    done = loraplex("adapter", "push", "by-hand", str(adapters_folder() / "json"), *flags)
    assert done.returncode == 0, done.stderr
    assert "by-hand" in loraplex("adapter", "list", *flags).stdout
    assert globex.ask("by-hand", "Why is the sky blue?").startswith("{")


def for_another_base(folder: Path) -> dict[str, bytes]:
    """Return the pirate as trained on a model with half the hidden size."""
    tensors = load_file(adapters_folder() / "pirate" / WEIGHTS)
    halved = {name: (t[:, : t.shape[1] // 2] if "lora_A" in name else t).contiguous() for name, t in tensors.items()}
    save_file(halved, folder / WEIGHTS)
    return files("pirate") | {WEIGHTS: (folder / WEIGHTS).read_bytes()}


def with_nan(folder: Path) -> dict[str, bytes]:
    tensors = load_file(adapters_folder() / "pirate" / WEIGHTS)
    first = next(iter(tensors))
    tensors[first][0, 0] = torch.nan
    save_file(tensors, folder / WEIGHTS)
    return files("pirate") | {WEIGHTS: (folder / WEIGHTS).read_bytes()}


def with_config(**changes: object) -> dict[str, bytes]:
    content = files("pirate")
    return content | {CONFIG: json.dumps(json.loads(content[CONFIG]) | changes).encode()}


BAD = {
    "no files": lambda folder: {},
    "no weights": lambda folder: {CONFIG: files("pirate")[CONFIG]},
    "not JSON": lambda folder: files("pirate") | {CONFIG: b"{"},
    "not safetensors": lambda folder: files("pirate") | {WEIGHTS: b"not a tensor"},
    "cut short": lambda folder: files("pirate") | {WEIGHTS: files("pirate")[WEIGHTS][:-1000]},
    "not an archive": lambda folder: {"bundle.zip": b"PK but no more"},
    "an archive of something else": lambda folder: {"bundle.zip": zipped({"readme.txt": b"hello"})},
    "an archive that climbs out": lambda folder: {"bundle.zip": zipped({f"../../{CONFIG}": files("pirate")[CONFIG]})},
    "another kind of adapter": lambda folder: with_config(peft_type="IA3"),
    "DoRA": lambda folder: with_config(use_dora=True),
    "another base": for_another_base,
    "NaN": with_nan,
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_an_adapter_for_this_base_is_refused(kind: str, tmp_path: Path, globex: Tenant):
    got = push(globex, {"name": b"bad"} | BAD[kind](tmp_path))
    assert got.status == 400, got.body
    error = got.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) > 20
    assert http("GET", f"{globex.url}/v1/adapters/bad", globex.key).status == 404


@pytest.mark.parametrize("name", [b"", b"../up", b"Has Space", b"a" * 200])
def test_a_bad_name_is_refused(name: bytes, globex: Tenant):
    got = push(globex, {"name": name} | files("pirate"))
    assert got.status == 400
    assert got.json["error"]["param"] == "name"
