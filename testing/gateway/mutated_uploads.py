"""Uploads that the gateway must refuse, made from a valid one: `mutated(files, seed, count)`, deterministic per seed.

Each kind makes the upload invalid, at a place that the seed chooses; so all of them must be refused. Used by the tests
(a few) and by the hostile benchmark (all). Needs only the standard library.
"""

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from testing.gateway import mutated_archives as archives

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BOUNDARY = "MUTATED-7d1c"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Mutated:
    """An invalid upload. kind: the defect. body, content_type: parts of a POST to /v1/adapters."""

    kind: str
    body: bytes
    content_type: str = f"multipart/form-data; boundary={BOUNDARY}"


def form(parts: dict[str, bytes], name: bytes = b"mutated") -> bytes:
    """Return a multipart form with the name and the files."""
    body = b""
    for field, content in {"name": name, **parts}.items():
        file = b"" if field == "name" else b'; filename="%s"' % field.encode()
        body += b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (
            BOUNDARY.encode(),
            field.encode(),
            file,
            content,
        )
    return body + b"--%s--\r\n" % BOUNDARY.encode()


def mutated(files: Files, seed: int = 0, count: int = 240) -> Iterator[Mutated]:
    """Return this number of mutated uploads, taking the kinds in turn."""
    kinds = list(_kinds().items())
    for number in range(count):
        kind, make = kinds[number % len(kinds)]
        made = make(dict(files), random.Random(f"{seed} {number}"))
        if isinstance(made, Mutated):
            yield made
        else:
            yield Mutated(kind, made if isinstance(made, bytes) else form(made))


# The weights: header and data.


def split(weights: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", weights[:8])
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def join(header: object, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def _entry(change: Callable[[dict[str, Any], random.Random], None]) -> Callable[[Files, random.Random], Files]:
    """Change one tensor's entry in the header."""

    def make(files: Files, rng: random.Random) -> Files:
        header, data = split(files[WEIGHTS])
        change(header[rng.choice([name for name in header if name != "__metadata__"])], rng)
        return files | {WEIGHTS: join(header, data)}

    return make


def _set(field: str, *values: Any) -> Callable[[Files, random.Random], Files]:
    return _entry(lambda entry, rng: entry.__setitem__(field, rng.choice(values)))


def _offsets(entry: dict[str, Any], rng: random.Random) -> None:
    entry["data_offsets"][rng.randrange(2)] += rng.choice([-(1 << 40), -8, -1, 1, 8, 1 << 40, 1 << 62])


def _renamed(files: Files, rng: random.Random) -> Files:
    header, data = split(files[WEIGHTS])
    name = rng.choice([name for name in header if name != "__metadata__"])
    other = rng.choice(
        ["x" * 5000, "", "\udc80", "a\x00b", name + "\n", "../" + name, name.replace(".lora_", ".lora_C")]
    )
    return files | {WEIGHTS: join({other if key == name else key: value for key, value in header.items()}, data)}


def _without_one(files: Files, rng: random.Random) -> Files:
    header, data = split(files[WEIGHTS])
    del header[rng.choice([name for name in header if name != "__metadata__"])]
    return files | {WEIGHTS: join(header, data)}


def _header_bytes(*headers: Callable[[random.Random], bytes]) -> Callable[[Files, random.Random], Files]:
    return lambda files, rng: files | {WEIGHTS: join(rng.choice(headers)(rng), split(files[WEIGHTS])[1])}


def _length(files: Files, rng: random.Random) -> Files:
    length = rng.choice([0, 1, 7, 1 << 21, (1 << 21) + 1, 1 << 31, 1 << 63, (1 << 64) - 1])
    return files | {WEIGHTS: struct.pack("<Q", length) + files[WEIGHTS][8:]}


def _cut(files: Files, rng: random.Random) -> Files:
    weights = files[WEIGHTS]
    return files | {WEIGHTS: weights[: rng.randrange(len(weights))]}


def _longer(files: Files, rng: random.Random) -> Files:
    return files | {WEIGHTS: files[WEIGHTS] + rng.randbytes(rng.randint(1, 100_000))}


def _not_finite(files: Files, rng: random.Random) -> Files:
    """Put a NaN into one tensor by setting all bits, which is a NaN in every dtype."""
    header, data = split(files[WEIGHTS])
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    begin, end = entry["data_offsets"]
    width = {"F32": 4, "F16": 2, "BF16": 2}[entry["dtype"]]
    at = begin + width * rng.randrange((end - begin) // width)
    return files | {WEIGHTS: join(header, data[:at] + b"\xff" * width + data[at + width :])}


def _pickle(_: Files, rng: random.Random) -> Files:
    return {CONFIG: b"{}", WEIGHTS: b"\x80\x04cos\nsystem\n(S'true'\ntR." * rng.randint(1, 100)}


# The config.


def _config(*changes: dict[str, Any]) -> Callable[[Files, random.Random], Files]:
    def make(files: Files, rng: random.Random) -> Files:
        return files | {CONFIG: json.dumps(json.loads(files[CONFIG]) | rng.choice(changes)).encode()}

    return make


def _config_field(name: str, *values: object) -> Callable[[Files, random.Random], Files]:
    return _config(*({name: value} for value in values))


def _config_bytes(*contents: bytes) -> Callable[[Files, random.Random], Files]:
    return lambda files, rng: files | {CONFIG: rng.choice(contents)}


def _raw_field(*texts: bytes) -> Callable[[Files, random.Random], Files]:
    """Insert a field as raw JSON text that json.dumps would not write."""
    return lambda files, rng: files | {CONFIG: files[CONFIG].rstrip()[:-1] + b", " + rng.choice(texts) + b"}"}


def dear_patterns(rng: random.Random) -> dict[str, int]:
    """Return regular expressions that take a backtracking or careless matcher exponential time."""
    bomb = rng.choice(
        [r"(\w+)+x", r"(?:(?:(?:){40}){40}){40}y", "[" + "a-z0-9" * 500 + "]*x", r"(?=(\w|\d)*x)(.*.*.*)z"]
    )
    return {f"{bomb}{number}": 1 for number in range(4000 if len(bomb) < 100 else 200)}


def _dear(files: Files, rng: random.Random) -> Files:
    """Return expensive patterns in an adapter that is invalid for a later reason too."""
    field = rng.choice(["rank_pattern", "alpha_pattern"])
    config = json.loads(files[CONFIG]) | {field: dear_patterns(rng)}
    return _not_finite(files, rng) | {CONFIG: json.dumps(config).encode()}


# Names and the form's framing.


def _name(files: Files, rng: random.Random) -> bytes:
    names = [
        b"",
        b"\xff\xfe",
        b"A",
        b"../x",
        b"a b",
        b"a" * 65,
        b"a" * 100_000,
        b"\x00",
        b"a\n",
        "ａ".encode(),
        b"\xed\xb2\x80",
    ]
    return form(files, rng.choice(names))


def _framing(files: Files, rng: random.Random) -> bytes:
    good, mark = form(files), b"--" + BOUNDARY.encode()
    ways = [
        lambda: good[: rng.randrange(len(good) - len(mark) - 4)],
        lambda: good.replace(mark, b"--another", 1),
        lambda: b"\n" * rng.randint(3, 100_000) + good,
        lambda: good.replace(b"form-data;", b"attachment;"),
        lambda: good.replace(b"Content-Disposition", b"X-Disposition"),
        lambda: good.replace(b'name="name"', b'name="\xff\xfe"'),
        lambda: good.replace(b'name="name"', b'name="%s"' % (b"n" * rng.randint(65, 7000))),
        lambda: good.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * 10_000 + b"\r\n\r\n", 1),
        lambda: good.replace(b"\r\n\r\n", b"\r\nno colon here\r\n\r\n", 1),
        lambda: good.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n"),
        lambda: good[: -len(mark) - 4] + good,
        lambda: good.replace(b"\r\n", b"\n"),
        lambda: mark + b"--\r\n",
        lambda: b"",
    ]
    return rng.choice(ways)()


def _content_type(files: Files, rng: random.Random) -> Mutated:
    kinds = ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=" + "b" * 71]
    kinds += ["application/json", "multipart/mixed; boundary=other", "text/plain", "multipart/form-data; boundary=\xfc"]
    return Mutated("content type", form(files), rng.choice(kinds))


# Nesting that exceeds any parser's recursion limit.
DEEP = b"[" * 100_000
Make = Callable[[Files, random.Random], Any]


def _kinds() -> dict[str, Make]:
    others = {"name": _name, "framing": _framing, "content type": _content_type}
    return _weight_kinds() | _config_kinds() | _archive_kinds() | others


def _weight_kinds() -> dict[str, Make]:
    return {
        "dtype": _set("dtype", "F64", "I8", "BOOL", "F8_E4M3", "", None, 7, ["F32"], "f32", "x" * 20_000),
        "shape": _set(
            "shape", [], [0, 16], [4], [4, 16, 1], [-4, 16], [4.0, 16], [1 << 62, 4], None, "4x16", [[4], 16]
        ),
        "offsets": _entry(_offsets),
        "offsets of another kind": _set(
            "data_offsets", None, [], [0], [0, 1, 2], ["0", "256"], [0.0, 256.0], {}, [-1, 255]
        ),
        "entry of another kind": _entry(lambda entry, rng: entry.clear()),
        "tensor's name": _renamed,
        "tensor missing": _without_one,
        "header's bytes": _header_bytes(
            lambda rng: DEEP,
            lambda rng: b'{"a":' * 5000,
            lambda rng: rng.randbytes(rng.randint(1, 5000)) + b"\xff",
            lambda rng: b'{"a": {}, "a": {}}',
            lambda rng: b'{"a": ' + b"9" * 5000 + b"}",
            lambda rng: b"[]",
            lambda rng: b"{" + b",".join(b'"%x":{}' % i for i in range(100_000)) + b"}",
        ),
        "header's length": _length,
        "weights cut off": _cut,
        "weights with a tail": _longer,
        "NaN": _not_finite,
        "pickle": _pickle,
    }


def _config_kinds() -> dict[str, Make]:
    return {
        "rank": _config_field("r", 0, -1, 65, 4096, 4097, 1 << 70, 1.5, "8", True, [4], {}),
        "alpha": _config_field("lora_alpha", "8", None, [], True, 10**400, 1e300, {}),
        "targets": _config_field(
            "target_modules", [], "", ["nothing"], 7, [7], {"a": 1}, "(" * 50, "[", "(?i)q_proj", "x" * 5000
        ),
        "not served": _config(
            {"peft_type": "IA3"},
            {"use_dora": True},
            {"bias": "all"},
            {"modules_to_save": ["lm_head"]},
            {"task_type": "SEQ_CLS"},
            {"init_lora_weights": "pissa"},
            {"unheard_of": "\udc80" * 3},
            {"x" * 100_000: 1},
            {"layer_replication": [[0, 1]]},
            {"peft_type": "\udcff" * 10},
            {"bias": "x" * 900_000},
        ),
        "patterns": _config(
            {"rank_pattern": []},
            {"rank_pattern": {"q_proj": 0}},
            {"rank_pattern": {"(": 1}},
            {"rank_pattern": {"q_proj": 9999}},
            {"alpha_pattern": {"q_proj": "x"}},
            {"rank_pattern": {str(i): 1 for i in range(5000)}},
            {"alpha_pattern": "x"},
        ),
        "dear patterns": _dear,
        "config's bytes": _config_bytes(
            b"", b"{", b"null", b"[]", b'"x"', DEEP, b"\xff\xfe{}", b"{}" * 2, b"NaN", b" " * (2 << 20)
        ),
        "config's text": _raw_field(
            b'"r": 4, "r": 4',
            b'"r": ' + b"9" * 5000,
            b'"lora_alpha": NaN',
            b'"lora_alpha": 1e999',
            b'"x": ' + DEEP,
            b'"r": 0x4',
        ),
    }


def _archive_kinds() -> dict[str, Make]:
    return {
        "zip entry's method": archives.zip_field(10, 2, b"PK\x01\x02"),
        "zip entry's check sum": archives.zip_field(16, 4, b"PK\x01\x02"),
        "zip entry's packed size": archives.zip_field(20, 4, b"PK\x01\x02"),
        "zip entry's size": archives.zip_field(24, 4, b"PK\x01\x02"),
        "zip entry's name length": archives.zip_field(28, 2, b"PK\x01\x02"),
        "zip entry's offset": archives.zip_field(42, 4, b"PK\x01\x02"),
        "zip's entries": archives.zip_field(10, 2, b"PK\x05\x06"),
        "zip's directory size": archives.zip_field(12, 4, b"PK\x05\x06"),
        "zip's directory offset": archives.zip_field(16, 4, b"PK\x05\x06"),
        "zip's method": archives.zip_method,
        "zip of zeros": archives.zip_bomb,
        "zip of many": archives.many,
        "member": archives.member,
        "special member": archives.special,
        "pax": archives.pax,
        "tar's size": archives.tar_size,
        "tar's byte": archives.tar_byte,
        "gzip of zeros": archives.gzip_bomb,
        "gzip": archives.gzip_broken,
        "another archive": archives.other_archive,
        "nested": archives.nested,
    }
