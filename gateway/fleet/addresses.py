"""Items of `LORAPLEX_ENGINES`: an engine's address, kind and limits."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

Kind = Literal["loraplex", "vllm"]
# An item in place of a URL: engines may announce themselves (`loraplex engine --gateway`).
ANNOUNCED = "announced"
VLLM = "vllm+"
OPTIONS = "adapters=N, requests=N, key_env=NAME, key_file=PATH, any_version=true"

_KEY = re.compile(r"[!-~]+")
# A function that returns the API key named by `key_env` or `key_file`. Raises ValueError.
ReadKey = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Address:
    """An item of the list.

    url: `http(s)://host:port`, or `dns://name:port`, which stands for an engine at each address of the name. The other
    fields are for vLLM, which does not report them. adapters: most adapters kept loaded, best equal to --max-cpu-loras.
    requests: most requests sent to it at once, best equal to --max-num-seqs. key: its --api-key. any_version: whether
    releases that may serve another request's adapter are used too.
    """

    url: str
    kind: Kind = "loraplex"
    adapters: int = 64
    requests: int = 64
    key: str | None = field(default=None, repr=False)
    any_version: bool = False

    @property
    def bearer(self) -> dict[str, str]:
        """Return the header that authenticates at a vLLM server: its own key, never the token of our engines."""
        return {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}


def parse_address(text: str, read_key: ReadKey | None = None) -> Address:
    """Parse `http://host:port` or `dns://name:port`, either after `vllm+` with options after a `?`.

    read_key: None for a text that is not the operator's, such as an announcement. Such a text must not name a file or
    variable, whose content would be sent to its author. Raises ValueError without quoting the URL, which may hold a
    secret.
    """
    is_vllm = text.startswith(VLLM)
    parts = urlsplit(text.removeprefix(VLLM))
    if parts.scheme not in ("http", "https", "dns") or not parts.hostname:
        raise ValueError(f"expected http://, https:// or dns://, after {VLLM} for vLLM, or the word {ANNOUNCED}")
    if "@" in parts.netloc:
        raise ValueError("expected no user or password in the URL; a vLLM server's key is named by key_env or key_file")
    if parts.scheme == "dns" and parts.port is None:
        raise ValueError("expected a port in dns://name:port")
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    if not is_vllm:
        if parts.query:
            raise ValueError(f"only {VLLM}http:// takes options after a ?")
        return Address(url)
    return Address(url, "vllm", **_options(parts.query, read_key))


def _options(query: str, read_key: ReadKey | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if read_key is None and name in ("key_env", "key_file", "any_version"):
            raise ValueError(f"only an engine that LORAPLEX_ENGINES lists may have the option {name}")
        if name in ("adapters", "requests") and value.isdecimal() and int(value) >= 1:
            options[name] = int(value)
        elif name == "any_version" and value in ("true", "false"):
            options[name] = value == "true"
        elif read_key is not None and name in ("key_env", "key_file") and value and "key" not in options:
            options["key"] = read_key(name, value).strip()
            if not _KEY.fullmatch(options["key"]):
                raise ValueError(f"{name} names an empty key, or one with spaces or characters beyond ASCII")
        else:
            raise ValueError(f"expected options among {OPTIONS} after the ?, with numbers above 0 and at most one key")
    return options
