"""docs/development.md shows code that runs and names functions that exist."""

import importlib
import re
from pathlib import Path

import pytest

from nodeagent.model import Signal
from tests.policy.nodes import MI, snapshot, view

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")


def test_the_decision_in_the_page_is_made_and_says_who_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    code = "\n".join(line.removeprefix("  ") for line in block.splitlines())
    seen = snapshot(view("small", 10 * MI), view("large", 90 * MI), available={Signal.MEMORY: 50 * MI})
    exec(compile(code, "docs/development.md", "exec"), {"snapshot": seen})
    said = capsys.readouterr().out
    assert said.startswith("shop/large 1.0 The node was low on resource: memory. Threshold quantity: 100Mi, ")


def test_what_the_page_calls_by_name_exists() -> None:
    rows = re.findall(r"^\| \d+, .*?\| (.*) \|$", PAGE, flags=re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`((?:policy|config)\.[\w.]+)`", row)}
    assert len(names) > 8
    for name in names:
        try:
            importlib.import_module(f"nodeagent.{name}")
        except ModuleNotFoundError:
            module, _, function = name.rpartition(".")
            assert callable(getattr(importlib.import_module(f"nodeagent.{module}"), function)), name
