"""What `LORAPLEX_ENGINES` may hold: where engines are, of which kind, and how much each may be given."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

Kind = Literal["loraplex", "vllm"]
# In place of a URL: engines may announce themselves (`loraplex engine --gateway`).
ANNOUNCED = "announced"
VLLM = "vllm+"


@dataclass(frozen=True, slots=True)
class Address:
    """One item of the list. url: `http(s)://host:port`, or `dns://name:port`, which stands for an engine at each
    address that the name has. The rest is for vLLM, which does not say it: adapters: names kept loaded, best its
    --max-cpu-loras; requests: most that it is given at once, best its --max-num-seqs."""

    url: str
    kind: Kind = "loraplex"
    adapters: int = 64
    requests: int = 64


def parse_address(text: str) -> Address:
    """`http://host:port`, `dns://name:port`, either after `vllm+` and with `?adapters=&requests=`.

    Raises ValueError in words that repeat no part of the URL, for it may hold a password.
    """
    is_vllm = text.startswith(VLLM)
    parts = urlsplit(text.removeprefix(VLLM))
    if parts.scheme not in ("http", "https", "dns") or not parts.hostname:
        raise ValueError(f"expected http://, https:// or dns://, after {VLLM} for vLLM, or the word {ANNOUNCED}")
    if parts.scheme == "dns" and parts.port is None:
        raise ValueError("expected a port in dns://name:port")
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    if not is_vllm:
        if parts.query:
            raise ValueError(f"only {VLLM}http:// takes options after a ?")
        return Address(url)
    options: dict[str, int] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in ("adapters", "requests") or not value.isdecimal() or int(value) < 1:
            raise ValueError("expected ?adapters=N&requests=N with numbers above 0, and nothing else")
        options[name] = int(value)
    return Address(url, "vllm", **options)
