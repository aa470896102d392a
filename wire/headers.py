"""Names of the headers of our own: between clients and the gateway, and between the gateway and its engines."""

# From a client: the session, which names its user if the body has none.
SESSION_HEADER = "x-loraplex-session"
# To a client: the budget that is left, and max_tokens if the quota shortened it.
BUDGET_HEADER = "x-loraplex-budget-remaining"
MAX_TOKENS_HEADER = "x-loraplex-max-tokens"
# From the engine, passed on to the client: the receipt, which names the adapter whose pages the steps read.
RECEIPT_HEADER = "x-loraplex-adapter-digest"
# Secrets: of the gateway and its engines, and of announcements if theirs differs.
INTERNAL_TOKEN_HEADER = "x-loraplex-internal-token"
ANNOUNCE_TOKEN_HEADER = "x-loraplex-announce-token"
# To the engine: the tenant, its weight and its priority.
TENANT_HEADER = "x-loraplex-tenant"
WEIGHT_HEADER = "x-loraplex-weight"
PRIORITY_HEADER = "x-loraplex-priority"
# To the engine: the target of the time to first token, in seconds.
TTFT_HEADER = "x-loraplex-ttft-target"
# To the engine: seconds since the request arrived at the gateway. It is a duration, because machines' clocks differ.
AGE_HEADER = "x-loraplex-age"
# To the engine: the gateway's allowance of completion tokens.
ALLOWANCE_HEADER = "x-loraplex-allowance"
# To the engine: the digest of the base model that the gateway knows of it; another engine may have its address.
BASE_HEADER = "x-loraplex-base"
