"""Lines of the keys and elements of TOML documents."""

import pytest

from loraplex.bench.toml_lines import TomlLines

# Q stands for a double quote, A for a single one.
FORMS = r"""# comment [ { QQQ
a = 1  # QQQ [
"b c" = QQQ
d = 2 \QQQ
[e]
QQQQQ
f.g = [ # ]
  {h = 1, k.'l' = [
    'm',
  ]},

  {i = "]\","},
  [[], 1979-05-27 07:32:00, ["x"
  ]],
]
[j."k l".m]
n = {o = {p = 1}}
[[q]]
[[q]]
r = AAA
]'
AAAAA
[[q.s]]
"t\u0041" = 1
[ q . 'u' ]
v = +inf
w = {}
x = 1
[y.z]
[y]"""
LINES: dict[tuple[str | int, ...], int] = {
    ("a",): 2,
    ("b c",): 3,
    ("f",): 7,
    ("f", "g", 0): 8,
    ("f", "g", 0, "h"): 8,
    ("f", "g", 0, "k", "l"): 8,
    ("f", "g", 0, "k", "l", 0): 9,
    ("f", "g", 1, "i"): 12,
    ("f", "g", 2): 13,
    ("f", "g", 2, 2, 0): 13,
    ("j",): 16,
    ("j", "k l"): 16,
    ("j", "k l", "m"): 16,
    ("j", "k l", "m", "n"): 17,
    ("j", "k l", "m", "n", "o", "p"): 17,
    ("q",): 18,
    ("q", 1): 19,
    ("q", 1, "r"): 20,
    ("q", 1, "s"): 23,
    ("q", 1, "s", 0): 23,
    ("q", 1, "s", 0, "tA"): 24,
    ("q", 1, "u"): 25,
    ("q", 1, "u", "v"): 26,
    ("q", 1, "u", "x"): 28,
    ("q", 1, "u", "missing"): 25,
    ("y", "z"): 29,
    ("y",): 30,
    ("e",): 1,
}


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_lines_of_keys_and_elements_in_every_form_of_toml(end):
    lines = TomlLines(FORMS.replace("Q", '"').replace("A", "'").replace("\n", end))
    assert lines.value["b c"] == 'd = 2 """\n[e]\n""'
    assert {path: lines.line(path) for path in LINES} == LINES


def test_the_lines_of_a_long_list_and_of_many_short_keys():
    """Their number is such that a scan whose time grows with its square would not end."""
    text = "a = [\n" + "1, # [\n" * 60_000 + "]\n" + "".join(f"k{i} = {{v = []}}\n" for i in range(20_000))
    lines = TomlLines(text)
    assert lines.line(("a", 59_999)) == 60_001
    assert lines.line(("k19999", "v")) == 80_002
