"""Labels of metrics with a bounded number of values, so that no tenant can grow the number of series."""

import re

from wire.mixtures import is_mixture

# Maximum number of tenants with series of their own in a process; later tenants share the label OTHER.
MAX_TENANTS = 500
# Maximum number of a tenant's models with series of their own.
MAX_MODELS = 8
# Labels of the rest. Parentheses cannot occur in the name of a tenant or an adapter.
OTHER = "(other)"
MIXTURE = "(mixture)"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# A version, an alias or a weight after the name of an adapter.
_SUFFIX = re.compile("[@:].*")


class TenantLabels:
    """Labels of tenants and of their models. The first names keep their labels until the process ends."""

    def __init__(self, max_tenants: int = MAX_TENANTS, max_models: int = MAX_MODELS) -> None:
        self._max_tenants = max_tenants
        self._max_models = max_models
        self._models: dict[str, set[str]] = {}

    def tenant(self, name: str) -> str:
        """Return the label of a tenant."""
        if name not in self._models:
            if len(self._models) >= self._max_tenants:
                return OTHER
            self._models[name] = set()
        return name

    def model(self, tenant: str, model: str, *, is_adapter: bool) -> str:
        """Return the label of a tenant's model: an adapter without its version or alias, the base model, or MIXTURE.

        Each tenant has a cap of its own, so that none uses up another's.
        """
        name = _SUFFIX.sub("", model) if is_adapter else MIXTURE if is_mixture(model) else model
        label = self.tenant(tenant)
        if label == OTHER:
            return OTHER
        models = self._models[label]
        if name not in models:
            if len(models) >= self._max_models:
                return OTHER
            models.add(name)
        return name


def method_label(method: str) -> str:
    """Return the label of an HTTP method, which a client may invent."""
    return method if method in METHODS else OTHER
