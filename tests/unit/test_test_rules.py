"""What a test of ours may not do: import another test module, or patch our own code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import REPOSITORY

TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def test_no_test_module_is_imported() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in TESTS
        for name in imported(path)
        if re.search(r"^tests\..*\b(test_\w+|conftest)\b", name)
    ]
    assert wrong == []


def test_no_test_patches_our_own_code() -> None:
    """A clock, a host, a transport or a step is handed in. Of the standard library `monkeypatch` may change what a
    test needs: the environment, the working directory, a clock."""
    wrong = []
    for path in TESTS:
        text = path.read_text("utf-8")
        ours = {name.rpartition(".")[2] for name in imported(path) if name.startswith("nodeagent")}
        patched = re.findall(r"(?:setattr|delattr|setitem)\(\s*(\"nodeagent[^\"]*\"|\w+)", text)
        wrong += [
            f"{path.relative_to(REPOSITORY)}: {name}"
            for name in patched
            if name.startswith('"nodeagent') or name in ours
        ]
        if "unittest.mock" in text and path.name != Path(__file__).name:
            wrong.append(f"{path.relative_to(REPOSITORY)}: unittest.mock")
    assert wrong == []


def test_every_unit_test_lies_beside_a_package() -> None:
    for path in (REPOSITORY / "tests" / "unit").rglob("test_*.py"):
        package = REPOSITORY / "nodeagent" / path.parent.relative_to(REPOSITORY / "tests" / "unit")
        assert package.is_dir(), path
