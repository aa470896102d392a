"""Ready examples of calls: the address of the API, a model that the key may use, and the text of the calls."""

import json
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from gateway.caller import CALLER
from gateway.errors import GatewayError
from gateway.process.admin_port import is_admin_port
from gateway.records.adapters.catalog import Catalog
from gateway.records.bases.registry import Bases
from gateway.records.keys.keys import ApiKey
from gateway.records.version_state import READY

log = logging.getLogger(__name__)

# Variable that the examples read the key from if they don't contain it.
VARIABLE = "LORAPLEX_KEY"


class Snippet(NamedTuple):
    """A ready example. Its text is plain, so that a template escapes it in attributes."""

    title: str
    text: str


class KeyExamples:
    """Examples for the page that shows a new key. port, admin_port: the gateway's own."""

    def __init__(self, catalog: Catalog, bases: Bases, *, port: int, admin_port: int | None) -> None:
        self._catalog = catalog
        self._bases = bases
        self._port = port
        self._admin_port = admin_port

    async def context(self, request: web.Request, key: ApiKey, clear: str) -> dict[str, Any]:
        """Return the variables `base_url` and `snippets` of `key_made.html`. clear: the key as clients send it.

        There are no snippets for a key that may send no request, or has no model yet.
        """
        if key.tenant is None or "inference" not in key.scopes:
            return {"base_url": None, "snippets": []}
        address = self.address(request)
        model = await self._model(key)
        snippets = make_snippets(address, model, clear) if model is not None else []
        return {"base_url": f"{address}/v1", "snippets": snippets}

    def address(self, request: web.Request) -> str:
        """Return the origin that tenants use. The port that only operators may use is replaced by the common one."""
        address, own = origin(request), f":{self._admin_port}"
        if is_admin_port(request, self._admin_port) and address.endswith(own):
            return f"{address.removesuffix(own)}:{self._port}"
        return address

    async def _model(self, key: ApiKey) -> str | None:
        """Return a model that the key may use. The page has to show the key even if the adapters cannot be read."""
        names: list[str] = []
        if key.tenant is not None:
            try:
                names = [each.name for each in await self._catalog.list(key.tenant) if each.state == READY]
            except GatewayError:
                log.warning("the example of a new key names no adapter, because they cannot be read", exc_info=True)
        bases = [base.name for base in self._bases.listed]
        return next((name for name in (*names, *bases) if _may_use(key, name)), None)


class _Limited(Protocol):
    """Holder of a key's models."""

    def may_use(self, model: str) -> bool: ...


def origin(request: web.Request) -> str:
    """Return the scheme and host under which the visitor's browser reaches this gateway."""
    caller = CALLER.get()
    scheme = "https" if caller is not None and caller.is_https else "http"
    return f"{scheme}://{request.host}"


def example_models(names: Iterable[str], principal: _Limited, base_names: Iterable[str]) -> list[str]:
    """Return the models for examples that the key may use: adapters first, then base models."""
    return [name for name in (*names, *base_names) if principal.may_use(name)]


def make_snippets(address: str, model: str, key: str | None = None) -> list[Snippet]:
    """Return ready examples for the origin `address`. key: the secret; None: they read it from the environment."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50})
    quoted = body.replace("'", "'\\''")
    shell = (
        f'curl {address}/v1/chat/completions \\\n  -H "Authorization: Bearer {key or f"${VARIABLE}"}" \\\n'
        f"  -H 'Content-Type: application/json' \\\n  -d '{quoted}'"
    )
    opening = "" if key else "import os\n"
    secret = json.dumps(key) if key else f'os.environ["{VARIABLE}"]'
    python = f"""{opening}from openai import OpenAI

client = OpenAI(base_url={json.dumps(f"{address}/v1")}, api_key={secret})
answer = client.chat.completions.create(
    model={json.dumps(model)},
    messages=[{{"role": "user", "content": "Hello"}}],
    max_tokens=50,
)
print(answer.choices[0].message.content)"""
    return [Snippet("Shell", shell), Snippet("Python", python)]


def _may_use(key: ApiKey, model: str) -> bool:
    return key.allowed_models is None or model in key.allowed_models
