"""Construction of the log-in pages."""

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from gateway.access.login_audit import LoginAudit
from gateway.access.oidc import Oidc
from gateway.components import Records
from gateway.pages.frame.frame import Frame
from gateway.pages.login.oidc import OidcPages
from gateway.pages.login.page import LoginPages
from gateway.resources import Resources


def build_login(frame: Frame, resources: Resources, records: Records) -> list[Any]:
    """Return the objects of log-in with a key, and at the OpenID Connect provider."""
    settings, provider = resources.settings, resources.settings.oidc_provider
    login = LoginPages(
        frame=frame,
        auth=records.auth,
        sessions=records.sessions,
        throttle=records.wrong_keys,
        audit=LoginAudit(records.audit),
        lifetime=timedelta(seconds=settings.session_seconds),
        provider=None if provider is None else urlsplit(provider.issuer).hostname,
        admin_port=settings.admin_port,
    )
    oidc = OidcPages(
        oidc=None if provider is None else Oidc(provider, resources.session),
        auth=records.auth,
        tenants=records.tenants,
        pages=login,
        redis=resources.redis,
    )
    return [login, oidc]
