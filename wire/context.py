"""Errors of requests that exceed a model's context length, in OpenAI's wording.

Clients parse the message to learn that they must shorten the prompt or the answer. limit: the context length in tokens.
"""

from wire.errors import BadRequest

CODE = "context_length_exceeded"


def prompt_too_long(field: str, limit: int, at_least: int) -> BadRequest:
    """Build the error for a prompt that exceeds the context length, whose tokens were not all counted."""
    return BadRequest(
        field,
        f"This model's maximum context length is {limit} tokens. However, your {field} has more than {at_least} "
        f"tokens. Please reduce its length.",
        CODE,
    )


def answer_too_long(field: str, limit: int, answer_tokens: int) -> BadRequest:
    """Build the error for an answer that exceeds the context length without its prompt."""
    return BadRequest(
        field,
        f"This model's maximum context length is {limit} tokens. However, you requested {answer_tokens} tokens in the "
        f"completion. Please reduce {field}.",
        CODE,
    )


def context_exceeded(field: str, limit: int, prompt_tokens: int, answer_tokens: int, prompt_field: str) -> BadRequest:
    """Build the error for a prompt and an answer that together exceed the context length. field: the one to blame."""
    return BadRequest(
        field,
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt_tokens + answer_tokens} tokens ({prompt_tokens} in the {prompt_field}, {answer_tokens} in the "
        f"completion). Please reduce the length of the {prompt_field} or of the completion.",
        CODE,
    )
