"""docs/development.md shows code that runs and names functions that exist."""

import importlib
import re

import pytest

from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "development.md").read_text(encoding="utf-8")


def test_the_decision_in_the_page_is_made_and_names_the_victim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    [block] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    code = "\n".join(line.removeprefix("  ") for line in block.splitlines())
    exec(compile(code, "docs/development.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(
        "shop/web 1.0 The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. "
    )


def test_what_the_page_calls_by_name_exists() -> None:
    names = set(re.findall(r"`((?:policy|config|kube)\.[\w.]+)`", PAGE))
    assert len(names) > 8
    for name in names:
        try:
            importlib.import_module(f"nodeagent.{name}")
        except ModuleNotFoundError:
            module, _, function = name.rpartition(".")
            assert callable(getattr(importlib.import_module(f"nodeagent.{module}"), function)), name
