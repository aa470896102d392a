"""Error codes on which our own programs act: the gateway on those of an engine, the command line on those of a gateway.

Our programs act on no other code; only clients and people read the others.
"""

# The engine refuses the adapter itself, whichever engine gets it.
ADAPTER_REFUSED = "adapter_refused"
# The engine neither serves the model nor finds it in its adapter store.
MODEL_NOT_FOUND = "model_not_found"
# The engine accepts no requests at present, because it shuts down or its core has failed.
ENGINE_UNAVAILABLE = "engine_unavailable"
# A part of an upload does not begin where the parts received end.
WRONG_OFFSET = "wrong_offset"
# The key is valid, but its tenant is suspended.
TENANT_SUSPENDED = "tenant_suspended"
# The tenant has used up its own share of the engine, so it may be served by another one.
ENGINE_SHARE_USED = "engine_share_used"
# The engine has no room at present, whichever tenant asks.
ENGINE_OVERLOADED = "engine_overloaded"
# The engine cannot read the adapter's files at present.
ADAPTER_FILES_UNREADABLE = "adapter_files_unreadable"
# The engine failed with the request.
GENERATION_FAILED = "generation_failed"
# The server's release does not have the route.
UNKNOWN_URL = "unknown_url"
