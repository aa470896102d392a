"""Error codes by which a receiver decides: the gateway about an engine's answer, the command line about a gateway's.

Other codes are for people and clients only.
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
