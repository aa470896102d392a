"""Garbage collections of a program: seldom while it starts, none at its exit, then as often as by default."""

import ast
import subprocess
import sys

import pytest

from wire.garbage import SELDOM

SCRIPT = """
import gc
from wire.garbage import SELDOM, collect_as_usual, collect_seldom

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("freed")

usual = gc.get_threshold()
collect_seldom()
assert gc.get_threshold() == (SELDOM, *usual[1:])
if {is_settled}:
    collect_as_usual()
    assert gc.get_threshold() == usual
Cycle()
print("ends")
"""


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_program_collects_seldom_while_it_starts_and_not_at_its_exit(is_settled: bool):
    command = [sys.executable, "-c", SCRIPT.format(is_settled=is_settled)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["ends"], "a collection at the exit frees the cycle"


COMMAND = """
import gc
print(gc.get_threshold())
from loraplex.cli import main
try:
    main(["--help"])
finally:
    print(gc.get_threshold())
"""


def test_the_command_line_collects_seldom():
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True)
    before, *_, after = (ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("("))
    assert after == (SELDOM, *before[1:])
