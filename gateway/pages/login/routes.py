"""Routes of log-in and log-out."""

from functools import partial

from gateway.access.roles import ADMIN_PATH, CONSOLE_PATH, Role
from gateway.api.route import Route
from gateway.pages.login.oidc import OidcPages
from gateway.pages.login.page import LoginPages


def _login_routes(home: str, people: str) -> tuple[Route, ...]:
    path, of = f"{home}/login", LoginPages
    least: Role = "viewer" if home == ADMIN_PATH else "tenant_member"
    opened, page = partial(Route, is_open=True, response=None), partial(Route, scope="page", role=least, response=None)
    return (
        opened("GET", path, of.form, f"Return the log-in page of {people}.", query=("next", "refused")),
        opened("POST", path, of.log_in, f"Log in with a key, for {people}.", query=()),
        page("POST", f"{home}/logout", of.log_out, "Log out.", query=()),
    )


def _oidc_routes(home: str) -> tuple[Route, ...]:
    path, opened = f"{home}/login/oidc", partial(Route, is_open=True, response=None)
    return (
        opened("GET", path, OidcPages.begin, "Log in at the OpenID Connect provider.", query=("next",)),
        opened("GET", f"{path}/return", OidcPages.finish, "Return from the OpenID Connect provider."),
    )


LOGIN_PAGES: dict[type, tuple[Route, ...]] = {
    OidcPages: _oidc_routes(ADMIN_PATH) + _oidc_routes(CONSOLE_PATH),
    LoginPages: _login_routes(ADMIN_PATH, "operators") + _login_routes(CONSOLE_PATH, "tenants"),
}
