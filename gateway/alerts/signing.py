"""Signatures of webhooks, as Standard Webhooks defines them (symmetric, version 1)."""

import base64
import hashlib
import hmac
from collections.abc import Sequence

SECRET_PREFIX = "whsec_"


def webhook_secret(pepper: str, webhook_id: str) -> str:
    """Return the secret of a webhook. It is derived from the id and not stored."""
    key = hmac.digest(pepper.encode(), f"webhook:{webhook_id}".encode(), hashlib.sha256)
    return SECRET_PREFIX + base64.b64encode(key).decode()


def signed_headers(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a message, with a signature for each secret.

    message_id: the same in every attempt. timestamp: Unix time of this attempt.
    """
    content = f"{message_id}.{timestamp}.".encode() + body
    keys = [base64.b64decode(secret.removeprefix(SECRET_PREFIX)) for secret in secrets]
    signatures = [base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
