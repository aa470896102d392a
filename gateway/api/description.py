"""Description of the gateway's routes, published as `/openapi.json`.

The OpenAI routes have the engine's types, the other routes the structs that decode their bodies.
"""

import re
from functools import cache
from typing import Any

from gateway.api.admin.keys import NewAdminKey, NewKey, Rotation
from gateway.api.admin.prices import NewPrice
from gateway.api.admin.tenants import NewTenant, TenantChanges
from gateway.api.engines import Announcement
from wire.openapi import Route, describe
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.responses import ChatCompletion, Completion, Model, ModelList

UPLOADS = ("/v1/adapters", "/admin/api/tenants/{tenant}/adapters")
OPEN = ("/healthz", "/readyz", "/openapi.json", "/admin", "/admin/static/style.css")
UPLOAD_FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "file": {"type": "string", "format": "binary", "description": "A .zip, .tar or .tar.gz of the two files."},
        "adapter_config.json": {"type": "string", "format": "binary"},
        "adapter_model.safetensors": {"type": "string", "format": "binary"},
    },
    "required": ["name"],
}

ROUTES = (
    Route("POST", "/v1/chat/completions", "Answer a chat.", ChatCompletionRequest, ChatCompletion, streams=True),
    Route("POST", "/v1/completions", "Continue a text.", CompletionRequest, Completion, streams=True),
    Route("GET", "/v1/models", "The base model and the tenant's adapters.", None, ModelList),
    Route("GET", "/v1/models/{name}", "One of them.", None, Model),
    Route("POST", "/v1/adapters", "Upload an adapter, or its next version.", None, dict),
    Route("GET", "/v1/adapters", "The tenant's adapters.", None, dict),
    Route("GET", "/v1/adapters/{name}", "One of them.", None, dict),
    Route("DELETE", "/v1/adapters/{name}", "Free an adapter's name.", None, dict),
    Route("GET", "/v1/usage", "What the tenant has used.", None, dict),
    Route("POST", "/admin/api/tenants", "Make a tenant.", NewTenant, dict),
    Route("GET", "/admin/api/tenants", "All tenants.", None, dict),
    Route("GET", "/admin/api/tenants/{tenant}", "One of them.", None, dict),
    Route("PATCH", "/admin/api/tenants/{tenant}", "Change a tenant.", TenantChanges, dict),
    Route("DELETE", "/admin/api/tenants/{tenant}", "Delete a tenant; its usage stays.", None, dict),
    Route("POST", "/admin/api/tenants/{tenant}/keys", "Make an API key; it is shown once.", NewKey, dict),
    Route("GET", "/admin/api/tenants/{tenant}/keys", "A tenant's keys.", None, dict),
    Route("POST", "/admin/api/keys", "Make an admin key; it is shown once.", NewAdminKey, dict),
    Route("GET", "/admin/api/keys", "The admin keys.", None, dict),
    Route("POST", "/admin/api/keys/{id}/rotate", "A new key for an old one.", Rotation, dict),
    Route("DELETE", "/admin/api/keys/{id}", "Revoke a key.", None, dict),
    Route("POST", "/admin/api/tenants/{tenant}/adapters", "Upload an adapter for a tenant.", None, dict),
    Route("GET", "/admin/api/tenants/{tenant}/adapters", "A tenant's adapters.", None, dict),
    Route("DELETE", "/admin/api/tenants/{tenant}/adapters/{name}", "Free an adapter's name.", None, dict),
    Route("POST", "/admin/api/adapters/collect", "Remove adapters that no name refers to.", None, dict),
    Route("GET", "/admin/api/usage", "What tenants have used.", None, dict),
    Route("GET", "/admin/api/engines", "The engines and how they are.", None, dict),
    Route("GET", "/admin/api/audit", "Who changed what.", None, dict),
    Route("GET", "/admin/api/prices", "What tokens cost.", None, dict),
    Route("PUT", "/admin/api/prices/{model}", "Set a model's price.", NewPrice, dict),
    Route("DELETE", "/admin/api/prices/{model}", "Take a price back.", None, dict),
    Route("POST", "/internal/engines", "An engine announces itself.", Announcement, dict),
    Route("DELETE", "/internal/engines", "An engine leaves.", Announcement, dict),
    Route("GET", "/admin", "Redirect to the status page."),
    Route("GET", "/admin/", "The status page, for browsers."),
    Route("GET", "/admin/static/style.css", "Its style."),
    Route("GET", "/healthz", "Whether the process lives.", None, dict),
    Route("GET", "/readyz", "Whether requests can be served.", None, dict),
    Route("GET", "/metrics", "For Prometheus."),
    Route("GET", "/openapi.json", "This description.", None, dict),
)


@cache
def gateway_description() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document, with the routes' key requirements and path parameters.

    The result is cached, because it takes 18 ms to build and the route needs no key.
    """
    description = describe("Loraplex gateway", ROUTES)
    description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in description["paths"].items():
        names = re.findall(r"\{(\w+)\}", path)
        for method, operation in operations.items():
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
            operation["security"] = [] if path in OPEN else [{"key": []}]
            if path in UPLOADS and method == "post":
                content = {"multipart/form-data": {"schema": UPLOAD_FORM}}
                operation["requestBody"] = {"required": True, "content": content}
    return description
