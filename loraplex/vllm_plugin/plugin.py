"""Plugin for vLLM: it fetches adapters named `sha256:<digest>` from Loraplex's store, so no gateway has to load them.

Two entry points, both named `loraplex`, in this package's pyproject.toml. `register` runs in each of vLLM's processes.
`ResolverInfoMetric` runs in the API server only, once the base model is known; the metric tells gateways that the
server has the plugin. Without LORAPLEX_ADAPTER_STORE both do nothing.
"""

import asyncio
import functools
import logging
import os
import weakref
from importlib.metadata import version
from typing import Any

from prometheus_client import Gauge
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.v1.metrics.loggers import StatLoggerBase

from loraplex.vllm_plugin.stored import STORE, AdapterRefused, AdapterUnavailable, StoredAdapters, open_adapters
from wire.digests import named_digest

# Below vLLM's logger, which has a handler.
log = logging.getLogger("vllm.loraplex")
# gateway/fleet/kinds/vllm.py reads the metric of this name.
METRIC = "loraplex_resolver_info"


def register() -> None:
    """Register the resolver if the environment names a store."""
    if os.environ.get(STORE):
        LoRAResolverRegistry.register_resolver("loraplex", StoreResolver())


@functools.cache
def _adapters() -> StoredAdapters | None:
    """Open the store, in the API server only: an engine's processes read the folders that it names."""
    return open_adapters()


class StoreResolver(LoRAResolver):
    """Resolver of names `sha256:<digest>`. Other names are left to other resolvers."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter, or None if the name is no digest or the store lacks it.

        Raises AdapterRefused, AdapterUnavailable.
        """
        digest, adapters = named_digest(lora_name), _adapters()
        if digest is None or adapters is None:
            return None
        try:
            held = await asyncio.to_thread(adapters.hold, digest, base_model_name)
        except (AdapterRefused, AdapterUnavailable) as error:
            log.error("adapter %s is not served: %s", lora_name, error)
            raise
        if held is None:
            log.warning("adapter %s is not in the adapter store", lora_name)
            return None
        request = _Request(lora_name=lora_name, lora_int_id=1, lora_path=str(held.folder))
        # vLLM keeps this object as long as it lists the name or runs a request of it, and may read the folder again for
        # as long: it evicts adapters from memory, and an unreadable folder would end its engine.
        weakref.finalize(request, held.release)
        return request


class _Request(LoRARequest, weakref=True):  # type: ignore[call-arg]
    """A LoRARequest to which a weak reference may point."""


class ResolverInfoMetric(StatLoggerBase):
    """Constant metric with the base model's digest and the device. It shows gateways that the server has the plugin.

    vLLM makes it at its start and gives it the configuration.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """Check the settings and the base model. Raises ValueError, AdapterUnavailable, which end vLLM's start."""
        adapters = _adapters()
        if adapters is not None and vllm_config.lora_config is not None:
            base = adapters.check_base(vllm_config.model_config.model)
            device = vllm_config.device_config.device_type
            _gauge().labels(base.digest or "", version("loraplex"), device).set(1)

    def record(self, *_: Any, **__: Any) -> None:
        """Do nothing: the metric is constant."""

    def log_engine_initialized(self) -> None:
        """Do nothing: the metric is set already."""


@functools.cache
def _gauge() -> Gauge:
    text = "Loraplex's plugin: this server fetches adapters by digest."
    return Gauge(METRIC, text, ["base_digest", "version", "device"], multiprocess_mode="mostrecent")
