"""Names of all keys in Redis, each with its type, lifetime and reason. `key_format.py` says how a name changes.

A tenant's keys have its id as hash tag, `{...}`: they are on one shard of a cluster, so that one script can use them.
A *lock* is a string that ends by expiry only: the process that sets it does the work, and no other process begins until
then. A deployment is named by a value that only its processes share, such as the database's URL; the key has a part of
its hash.
"""

import hashlib

# Hash, kept for ever. The newest layout of the keys that a program has written, and the oldest that is compatible.
FORMAT_KEY = "loraplex:format"

# Sorted set by time, kept for ever; entries expire after 10 s. URLs of the engines that announced themselves.
ANNOUNCED_ENGINES_KEY = "loraplex:engines"
# Hash by URL, kept for ever: a drain lasts until an operator ends it. Engines that get no new requests.
DRAINED_ENGINES_KEY = "loraplex:drained-engines"
# Sorted set by time, kept for ever; entries expire after 10 s. Live gateways, which divide limits while Redis is away.
GATEWAYS_KEY = "loraplex:gateways"

# Sorted set by time, kept for ever; a sweep removes a tenant without leases and events 600 s after its registration.
# Tenants that may have leases or usage events: `sweeps.py` visits no others.
REGISTERED_TENANTS_KEY = "loraplex:usage:active"
# Set of the previous release, whose gateways may add to it until they have been replaced.
REGISTERED_TENANTS_BEFORE_KEY = "loraplex:usage:tenants"
# String, 60 s. Number of events in all usage streams, as counted by the last sweep.
USAGE_BACKLOG_KEY = "loraplex:usage:backlog"
# String with a JSON object, 60 s. Numbers of events of the tenants with the most. Previous releases have none.
USAGE_BACKLOG_OF_TENANTS_KEY = "loraplex:usage:backlog:tenants"

# Lock, seconds. A gateway settles the leases of dead gateways.
LEASE_SWEEPER_KEY = "loraplex:sweeper"
# Lock, seconds. A process reads the usage events that others have left.
USAGE_SWEEPER_KEY = "loraplex:usage:sweeper"
# Lock, 15 s. A gateway removes the limits of ended keys.
LIMITS_REMOVER_KEY = "loraplex:quota:remover"
# Lock, one hour. A process does the hourly chores.
HOUSEKEEPING_KEY = "loraplex:housekeeping"
# Lock, seconds during a search and minutes during a check. A gateway checks golden answers.
GOLDEN_KEY = "loraplex:golden"


def golden_rest_key(tenant_id: str) -> str:
    """Return the key of a tenant's rest after a check of golden answers: a string.

    It lives for a multiple of the check's time, and meanwhile no other answers of the tenant are checked.
    """
    return f"{GOLDEN_KEY}:{tenant_id}"


def limits_key(tenant_id: str) -> str:
    """Return the key of the states of limits, of a tenant, its keys and its models: a hash by limit.

    It lives for 35 days after the last change, because the longest period of a limit is a month.
    """
    return f"loraplex:{{{tenant_id}}}:quota"


def leases_key(tenant_id: str) -> str:
    """Return the key of the leases of running requests: a sorted set by their end.

    It lives for 35 days after the last change.
    """
    return f"loraplex:{{{tenant_id}}}:leases"


def reservations_key(tenant_id: str) -> str:
    """Return the key of the reservations of running requests, and their progress: a hash by request.

    It lives for 35 days after the last change.
    """
    return f"loraplex:{{{tenant_id}}}:held"


def usage_key(tenant_id: str) -> str:
    """Return the key of the usage events of settled requests: a stream.

    It has no lifetime: the ledger deletes an event once SQL has it.
    """
    return f"loraplex:{{{tenant_id}}}:usage"


def abandoned_key(tenant_id: str) -> str:
    """Return the key of the requests that another gateway has settled: a sorted set by time.

    It lives for a day. Older requests are not restored, so none is settled twice.
    """
    return f"loraplex:{{{tenant_id}}}:abandoned"


def quota_keys(tenant_id: str) -> list[str]:
    """Return the keys of the quota's script, in its order."""
    of_tenant = (limits_key, leases_key, reservations_key, usage_key, abandoned_key)
    return [key(tenant_id) for key in of_tenant]


def idempotency_key(hashed: str) -> str:
    """Return the key of the answer to a request with an idempotency key: a string.

    It lives for 600 s while the request runs, and then for a day. hashed: hash of the actor and the header.
    """
    return f"loraplex:idempotency:{hashed}"


def idempotency_names_key(tenant_id: str) -> str:
    """Return the key of the names of a tenant's kept answers: a sorted set by time. It lives for a day after the last.

    The oldest answers are deleted when there are too many.
    """
    return f"loraplex:idempotency:of:{tenant_id}"


def probe_key(tenant_id: str, name: str, version: int) -> str:
    """Return the key of the lock to probe a version of an adapter.

    It lives for 90 s, so that a process that dies does not stop the probe.
    """
    return f"loraplex:probe:{tenant_id}:{name}:{version}"


def wrong_keys_key(deployment: str, address: str) -> str:
    """Return the key of an address's debt for wrong API keys: a string with the time at which it is paid off.

    It lives until then.
    """
    return f"loraplex:wrong-keys:{_hashed(deployment)[:8]}:{address}"


def oidc_state_key(state: str) -> str:
    """Return the key of a log-in's state that was used: a string.

    It lives for 600 s, as long as the state is valid, so that the state works once.
    """
    return f"loraplex:oidc:{state}"


def form_answers_prefix(owner: str) -> str:
    """Return the beginning of the keys of a visitor's answers to forms: encrypted strings.

    They live for an hour, or 60 s if they have a secret. owner: a keyed hash of the visitor.
    """
    return f"loraplex:answers:{owner}"


def adapter_uses_key(engine_url: str) -> str:
    """Return the key of the last uses of a foreign server's adapters: a sorted set by time.

    It lives for an hour. All processes unload the adapter that none of them uses.
    """
    return f"loraplex:adapter-uses:{_hashed(engine_url)}"


def service_keys(deployment: str) -> list[str]:
    """Return the keys of the tenants' service, in the order of `service_counters.lua`.

    They live for 300 s after the last exchange.
    """
    # The hash tag keeps them on one shard, because all keys of a script must be on one node.
    tag = f"loraplex:{{service:{_hashed(deployment)}}}"
    return [f"{tag}:{name}" for name in ("active", "presences", "idle", "processes", "weights")]


def deaths_key(deployment: str) -> str:
    """Return the key of the reports of engines that died with requests: a stream.

    It lives for the time in which a death counts, from its last report on.
    """
    return f"loraplex:deaths:{_hashed(deployment)}"


def deaths_processes_key(deployment: str) -> str:
    """Return the key of the processes that must answer a report of a death: a sorted set by time.

    It lives for 60 s after the last call. In a cluster it is in the slot of the reports.
    """
    return f"{{{deaths_key(deployment)}}}:processes"


def kept_engine_key(deployment: str) -> str:
    """Return the key of the engine that is kept for a suspected request: a string.

    It lives for 5 s after its renewal, so that the engine serves all again if the process dies.
    """
    return f"loraplex:kept:{_hashed(deployment)}"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
