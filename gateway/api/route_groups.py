"""Routes that exist twice: for a tenant's own key, and for an operator on the tenant's behalf."""

from collections.abc import Callable

from gateway.api.adapters.handlers import TenantAdapter
from gateway.api.adapters.saved_mixtures import (
    DeletedMixture,
    MixtureList,
    NewMixture,
    SavedMixtureRoutes,
    ShownMixture,
)
from gateway.api.adapters.versions import (
    AdapterVersions,
    AliasList,
    DeletedAdapter,
    DeletedAlias,
    NewTargets,
    ShownAlias,
    ShownVersion,
    VersionChanges,
    VersionList,
)
from gateway.api.admin.keys import KeyRoutes
from gateway.api.golden.handlers import CheckedGolden, DeletedGolden, GoldenRoutes, NewGolden, ShownGolden
from gateway.api.key_manager import KeyChanges, KeyList, NewKey, RevokedKey, Rotation, ShownKey
from gateway.api.route import ADDED, PUT, Route
from gateway.api.uploads.resumable import DeletedUpload, ResumableUploads, ShownUpload, UploadLimits

FORCE = ("force",)


def upload_routes(path: str, route: Callable[..., Route]) -> tuple[Route, ...]:
    one = f"{path}/{{id}}"
    return (
        route(
            "GET",
            path,
            ResumableUploads.limits,
            "Return the largest rank and size of an upload.",
            query=(),
            response=UploadLimits,
        ),
        route(
            "POST",
            path,
            ResumableUploads.begin,
            "Begin or resume an upload.",
            query=("name", "size", "sha256"),
            response=ShownUpload,
            statuses=(201,),
        ),
        route(
            "GET",
            one,
            ResumableUploads.get,
            "Return how much of an upload has arrived.",
            query=(),
            response=ShownUpload,
        ),
        route(
            "PUT",
            one,
            ResumableUploads.put,
            "Send a part of an upload.",
            query=("offset", "sha256"),
            response=ShownUpload,
        ),
        route(
            "POST",
            f"{one}/complete",
            ResumableUploads.complete,
            "Check the upload and add the version.",
            query=("base",),
            response=TenantAdapter,
            statuses=ADDED,
        ),
        route("DELETE", one, ResumableUploads.abort, "Abort an upload.", query=(), response=DeletedUpload),
    )


def version_routes(path: str, route: Callable[..., Route]) -> tuple[Route, ...]:
    name = f"{path}/{{name}}"
    version, alias = f"{name}/versions/{{version}}", f"{name}/aliases/{{alias}}"
    of = AdapterVersions
    return (
        route(
            "DELETE",
            name,
            of.delete,
            "Delete an adapter's name with its versions.",
            query=FORCE,
            response=DeletedAdapter,
        ),
        route("GET", f"{name}/versions", of.list, "List an adapter's versions.", query=(), response=VersionList),
        route("GET", version, of.get, "Return a version.", query=(), response=ShownVersion),
        route(
            "PATCH",
            version,
            of.change,
            "Retire, expire or pin a version.",
            query=FORCE,
            request=VersionChanges,
            response=ShownVersion,
        ),
        route("DELETE", version, of.delete, "Delete a version.", query=FORCE, response=DeletedAdapter),
        route("GET", f"{name}/aliases", of.list_aliases, "List an adapter's aliases.", query=(), response=AliasList),
        route("GET", alias, of.get_alias, "Return an alias and its ETag.", query=(), response=ShownAlias),
        route(
            "PUT",
            alias,
            of.move,
            "Point an alias to versions.",
            query=(),
            request=NewTargets,
            response=ShownAlias,
            statuses=PUT,
        ),
        route(
            "POST",
            f"{alias}/rollback",
            of.rollback,
            "Roll an alias back to its previous versions.",
            query=(),
            response=ShownAlias,
        ),
        route("DELETE", alias, of.delete_alias, "Delete an alias.", query=(), response=DeletedAlias),
    )


def golden_routes(path: str, route: Callable[..., Route], check_query: tuple[str, ...]) -> tuple[Route, ...]:
    one, of = f"{path}/{{name}}/versions/{{version}}/golden", GoldenRoutes
    return (
        route(
            "GET", one, of.get, "Return a version's golden answers and their checks.", query=(), response=ShownGolden
        ),
        route(
            "PUT",
            one,
            of.put,
            "Ask prompts and keep the golden answers.",
            query=(),
            request=NewGolden,
            response=ShownGolden,
        ),
        route("DELETE", one, of.delete, "Remove a version's golden answers.", query=(), response=DeletedGolden),
        route(
            "POST",
            f"{one}/check",
            of.check,
            "Check a version's golden answers.",
            query=check_query,
            response=CheckedGolden,
        ),
    )


def mixture_routes(path: str, route: Callable[..., Route]) -> tuple[Route, ...]:
    name, of = f"{path}/{{name}}", SavedMixtureRoutes
    return (
        route("GET", path, of.list, "List saved mixtures.", query=(), response=MixtureList),
        route("GET", name, of.get, "Return a saved mixture and its ETag.", query=(), response=ShownMixture),
        route(
            "PUT",
            name,
            of.save,
            "Save a mixture under a name.",
            query=(),
            request=NewMixture,
            response=ShownMixture,
            statuses=PUT,
        ),
        route("DELETE", name, of.delete, "Delete a saved mixture.", query=(), response=DeletedMixture),
    )


def key_routes(path: str, route: Callable[..., Route]) -> tuple[Route, ...]:
    one, of, made = f"{path}/{{id}}", KeyRoutes, "Create an API key of a tenant; only this answer contains it."
    changed = "Change the label and limits of a key."
    return (
        route("POST", path, of.create, made, query=FORCE, request=NewKey, response=ShownKey, statuses=(201,)),
        route("GET", path, of.list, "List a tenant's keys.", response=KeyList),
        route(
            "POST",
            f"{one}/rotate",
            of.rotate,
            "Replace a key of the own tenant.",
            request=Rotation,
            response=ShownKey,
            statuses=(201,),
        ),
        route("PATCH", one, of.change, changed, request=KeyChanges, response=ShownKey),
        route("DELETE", one, of.revoke, "Revoke a key of the own tenant.", response=RevokedKey),
    )
