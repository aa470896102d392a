"""Roles of people and keys: those of operators, and those of a tenant's own people.

An admin key or an operator's session has one of ADMIN_ROLES, a tenant's key or session one of TENANT_ROLES. Within each
group a role may do everything that the roles before it may. No role of one group counts in the other.
"""

from collections.abc import Set
from typing import Literal, get_args

from gateway.errors import Forbidden

AdminRole = Literal["viewer", "billing", "operator"]
TenantRole = Literal["tenant_member", "tenant_admin"]
Role = AdminRole | TenantRole

# From the lowest role to the highest.
ADMIN_ROLES: tuple[AdminRole, ...] = get_args(AdminRole)
TENANT_ROLES: tuple[TenantRole, ...] = get_args(TenantRole)

TENANT_SCOPES = frozenset({"inference", "adapters", "usage", "keys"})
# Scopes of a new key, and of a member who logs in by OIDC: all but the management of keys.
DEFAULT_SCOPES = TENANT_SCOPES - {"keys"}
# Scope of an operator's key. A key of another admin role has the role's name as its only scope, so that a gateway of an
# earlier release, which knows no roles, refuses it.
ADMIN_SCOPE = "admin"
ADMIN_SCOPES: dict[AdminRole, str] = {"viewer": "viewer", "billing": "billing", "operator": ADMIN_SCOPE}

# Paths below which the pages of each group lie; they are also the paths of the session cookies.
ADMIN_PATH, CONSOLE_PATH = "/admin", "/console"


def may(role: Role, least: Role) -> bool:
    """Return whether a role includes another. Roles of operators and of tenants never include each other."""
    for group in (ADMIN_ROLES, TENANT_ROLES):
        if role in group and least in group:
            return group.index(role) >= group.index(least)
    return False


def check_role(role: Role, least: Role, beyond: str = "") -> None:
    """Raise Forbidden, which names the needed role, if `role` does not include `least`.

    beyond: words about changes on the same route that need another role.
    """
    if not may(role, least):
        raise Forbidden(f"This needs the role '{least}'{beyond}; yours is '{role}'.", code="role_needed")


def admin_role(scopes: Set[str]) -> AdminRole | None:
    """Return the role of an admin key with these scopes; None if they are a tenant's."""
    return next((role for role in reversed(ADMIN_ROLES) if ADMIN_SCOPES[role] in scopes), None)


def tenant_role(scopes: Set[str]) -> TenantRole:
    """Return the role of a tenant's key with these scopes."""
    return "tenant_admin" if "keys" in scopes else "tenant_member"


def tenant_scopes(role: TenantRole) -> frozenset[str]:
    """Return the scopes of a person of a tenant who logs in without a key."""
    return TENANT_SCOPES if role == "tenant_admin" else DEFAULT_SCOPES


def home_of(role: Role) -> str:
    """Return the path of the pages that are for a role's group."""
    return ADMIN_PATH if role in ADMIN_ROLES else CONSOLE_PATH
