"""The table of faults in README.md names tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEXT = (TESTS / "faults" / "README.md").read_text()
ROWS = [
    2, 4, 5, 7, 9, 12, 14, 15, 16, 19, 20, 21, 23, 24, 25, 26, 28, 30, 31, 33, 35, 36, 37, 39, 40, 42, 43, 44, 45, 48,
    50, 53, 54, 55, 57, 58, 59, 60,
]  # fmt: skip


def test_every_fault_has_tests_that_are_there() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", TEXT, re.MULTILINE)
    assert [int(number) for number, _ in rows] == ROWS
    named = re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`( \(slow\))?", TEXT.partition("##")[2])
    assert all("::" in tests for _, tests in rows)
    for path, name, slow in named:
        text = (TESTS / path).read_text()
        if name:
            before = text.partition(f"def {name}(")[0]
            assert before != text, f"{path}::{name} is not there"
            marks = re.search(r"((?:^@.*\n(?:[ )\]].*\n)*)*)\Z", before, re.MULTILINE)
            assert marks is not None
            alone = "@pytest.mark.slow" in marks[0] or re.search(r"^pytestmark = .*slow", text, re.MULTILINE)
            assert bool(slow) == bool(alone), f"{path}::{name} is {'' if alone else 'not '}slow"
