"""Codes of errors: docs/reference.md lists each with its status, and a code that a receiver reads is spelt once."""

import ast
import re
from collections.abc import Iterator

import gateway.error_codes
import wire.error_codes
from tests.test_docs import REFERENCE, ROOT, sources

CODES = {
    name: code
    for module in (wire.error_codes, gateway.error_codes)
    for name, code in vars(module).items()
    if name.isupper() and isinstance(code, str)
}


class Errors:
    """Statuses and codes of the servers' errors, read from their source.

    A class sets them as `status, kind, code = 404, ...` or `code = ...`, or inherits them; a call adds `code="..."` to
    its class's status, or to the status that is its first argument.
    """

    def __init__(self) -> None:
        # Parsing takes most of the time. Other files have neither a subclass nor a code.
        texts = [path.read_text() for path in sources("gateway", "engine", "wire")]
        texts = [text for text in texts if re.search(r"\bclass \w+\(|\bcode\b|\bBadRequest\b", text)]
        nodes = {text: list(ast.walk(ast.parse(text))) for text in texts}
        self.classes = {n.name: n for found in nodes.values() for n in found if isinstance(n, ast.ClassDef)}
        self.pairs = {pair for name, node in self.classes.items() for pair in self.of_class(name, node)}
        coded = [found for text, found in nodes.items() if re.search(r"\bcode\b|\bBadRequest\b", text)]
        for function in [node for found in coded for node in found]:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                self.pairs |= set(self.of_calls(function))

    def of_class(self, name: str, node: ast.ClassDef) -> Iterator[tuple[int, str]]:
        code = spelt_code(assigned(node, "code"))
        if code is not None:
            yield self.status(name), code

    def of_calls(self, function: ast.AST) -> Iterator[tuple[int, str]]:
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            codes = [word.value for word in call.keywords if word.arg == "code"]
            if spelt_name(call.func) == "BadRequest" and len(call.args) == 3:
                codes.append(call.args[2])  # errors of `wire`, by position
            for code in codes:
                is_variable = isinstance(code, ast.Name) and code.id not in CODES
                value = assigned(function, code.id) if is_variable else code
                for branch in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                    if (text := spelt_code(branch)) is not None:
                        yield self.call_status(call), text

    def call_status(self, call: ast.Call) -> int:
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, int):
            return first.value
        return self.status(spelt_name(call.func))

    def status(self, name: str) -> int:
        """Return the status of a class or of its nearest ancestor; errors of `wire` carry none and are 400."""
        node = self.classes.get(name)
        if node is None:
            return 400
        own = assigned(node, "status")
        if isinstance(own, ast.Constant) and isinstance(own.value, int):
            return own.value
        return self.status(spelt_name(node.bases[0])) if node.bases else 400


def spelt_code(node: ast.expr | None) -> str | None:
    """Return the error code that a text or the name of a constant spells."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return CODES.get(name)
    return None


def spelt_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def assigned(scope: ast.AST, name: str) -> ast.expr | None:
    """Return the value assigned to the name in a class or function, also in a tuple assignment."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            else:
                pairs = [(target, node.value)]
            for aim, value in pairs:
                if isinstance(aim, ast.Name) and aim.id == name:
                    return value
    return None


def test_every_error_code_with_its_status_and_no_other():
    table = REFERENCE.split("## Errors")[1].split("## Metrics")[0]
    rows = [line.split("|") for line in table.splitlines() if re.match(r"\| \d{3} \|", line)]
    documented = {(int(row[1]), code) for row in rows for code in re.findall(r"`(\w+)`", row[2])}
    assert len(documented) > 30
    assert Errors().pairs == documented
    assert len(CODES) >= 12
    assert set(CODES.values()) <= {code for _, code in documented}


def test_a_code_by_which_a_receiver_decides_is_spelt_only_in_its_constant():
    """Else a sender could change it without its receivers."""
    spelt = {
        (path.relative_to(ROOT).as_posix(), node.value)
        for path in sources("gateway", "engine", "adapters", "kernels", "loraplex", "wire")
        if any(code in path.read_text() for code in CODES.values())
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in CODES.values()
    }
    homes = {"gateway/error_codes.py", "wire/error_codes.py"}
    assert {code for path, code in spelt if path in homes} == set(CODES.values())
    assert not {pair for pair in spelt if pair[0] not in homes}
