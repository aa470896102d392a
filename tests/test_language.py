"""Texts of errors for clients are whole sentences."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("gateway", "engine", "wire") for path in (ROOT / folder).rglob("*.py"))
# Errors whose text goes to a client.
ANSWERED = {
    "ApiError",
    "BadRequest",
    "ChatTemplateError",
    "Conflict",
    "EngineUnavailable",
    "Forbidden",
    "ProtocolError",
}
ANSWERED |= {"QueueFull", "RecordNotFound", "TenantQueueFull", "Unavailable", "UpstreamFailed"}


def last_words(node: ast.expr) -> str:
    """Return the literal end of a text, "" if it ends with a value."""
    last = node.values[-1] if isinstance(node, ast.JoinedStr) else node
    return last.value if isinstance(last, ast.Constant) and isinstance(last.value, str) else ""


def test_texts_of_errors_end_with_a_full_stop():
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                made = node.exc.func.value if isinstance(node.exc.func, ast.Attribute) else node.exc.func
                texts = [last_words(value) for value in node.exc.args if ast.unparse(made) in ANSWERED]
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {text}" for text in texts if " " in text]
    assert not [each for each in found if not each.endswith(".")]
    assert len(found) > 100
