"""Which package may import which: the rules of docs/development.md, held for every module."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.support.paths import REPOSITORY

LAYERS: Final = (
    {"commands"},
    {"loop", "analysis"},
    {"report", "telemetry"},
    {"actuators", "records"},
    {"sampling", "policy", "kube"},
    {"config"},
    {"cri"},
    {"runtime"},
    {"model"},
)
"""A package imports itself and packages of later rows only."""
SAMPLING: Final[dict[str, frozenset[str]]] = {
    "hostfs": frozenset(),
    "node": frozenset({"hostfs"}),
    "pods": frozenset({"hostfs", "node"}),
    "disk": frozenset({"hostfs", "node"}),
    "events": frozenset({"hostfs"}),
}
"""What each package within sampling imports. The modules beside them import all of them."""
ONLY_IN: Final = {
    "kubernetes": ("kube",),
    "urllib3": ("kube",),
    "h2": ("cri",),
    "msgspec": ("kube", "records", "actuators", "telemetry"),
    "pyroute2": ("sampling.events", "kube.node_identity"),
    "psutil": ("runtime", "sampling.node", "sampling.hostfs"),
    "structlog": ("telemetry", "loop"),
    "rich": ("report",),
    "shtab": ("commands",),
    "argparse": ("commands",),
    "subprocess": ("actuators",),
    "socket": ("runtime", "telemetry", "kube", "sampling.events", "cri"),
    "time": ("runtime", "telemetry", "kube", "actuators", "sampling", "commands", "records", "loop", "report", "cri"),
    "threading": ("runtime", "telemetry", "kube", "actuators", "sampling", "records", "loop"),
}
"""Who imports what reaches outside or depends on time. `policy` and `model` import none of them: they are pure."""
LAZY: Final = frozenset({"kubernetes", "pyroute2", "psutil", "rich", "yaml", "urllib3", "h2"})
"""Imported inside functions. `config.yaml_nodes`, which reads YAML and nothing else, is imported so itself."""


class Import(NamedTuple):
    """One import of a module."""

    module: str
    """The importer, without `nodeagent.`."""
    line: int
    target: str
    """Full name of what is imported; of `from x import y` the module that y names, or x."""
    lazy: bool
    """Inside a function, or for types only."""

    def __str__(self) -> str:
        return f"nodeagent/{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"


def name_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY / "nodeagent").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES: Final = {name_of(path): path for path in sorted((REPOSITORY / "nodeagent").rglob("*.py"))}


def imports_of(module: str) -> Iterator[Import]:
    tree = ast.parse(FILES[module].read_text("utf-8"))
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names: list[str] = []
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{each.name}" for each in node.names]
            names = [each if each.removeprefix("nodeagent.") in FILES else node.module for each in full]
        for name in dict.fromkeys(names):
            yield Import(module, line, name, id(node) not in top)


IMPORTS: Final = [each for module in FILES for each in imports_of(module)]


def package_of(name: str) -> str:
    return name.partition(".")[0]


def row_of(package: str) -> int:
    return next(number for number, row in enumerate(LAYERS) if package in row)


def ours(each: Import) -> str:
    """The module of ours that is imported; empty for others and for the package itself (its version)."""
    return each.target.removeprefix("nodeagent.") if each.target.startswith("nodeagent.") else ""


def test_every_package_has_its_row() -> None:
    packages = {package_of(name) for name in FILES} - {"", "__main__"}
    assert packages == set().union(*LAYERS)


def test_only_entry_points_stand_beside_the_packages() -> None:
    assert {name for name in FILES if "." not in name and FILES[name].name != "__init__.py"} == {"__main__"}


def test_imports_go_down_only() -> None:
    wrong = [
        str(each)
        for each in IMPORTS
        if (target := ours(each))
        and package_of(each.module) not in ("", "__main__")
        and package_of(target) != package_of(each.module)
        and row_of(package_of(target)) <= row_of(package_of(each.module))
    ]
    assert wrong == []


@pytest.mark.parametrize("part", SAMPLING)
def test_imports_within_sampling_go_down_only(part: str) -> None:
    wrong = []
    for each in IMPORTS:
        if each.module.startswith(f"sampling.{part}") and ours(each).startswith("sampling"):
            target = ours(each).split(".")[1] if "." in ours(each) else ""
            if target != part and target not in SAMPLING[part]:
                wrong.append(str(each))
    assert wrong == []


def test_no_modules_form_a_cycle() -> None:
    graph = {
        module: {ours(each) for each in IMPORTS if each.module == module and ours(each) in FILES} for module in FILES
    }
    settled: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in settled:
            for target in sorted(graph[module] - {module}):
                visit(target, (*trail, module))
            settled.add(module)

    for module in FILES:
        visit(module, ())


def test_libraries_are_imported_where_they_belong_and_nowhere_else() -> None:
    wrong = [
        str(each)
        for each in IMPORTS
        if (places := ONLY_IN.get(package_of(each.target))) is not None
        and not any(f"{each.module}.".startswith(f"{place}.") for place in places)
    ]
    assert wrong == []


def test_heavy_libraries_are_imported_when_they_are_used_and_not_before() -> None:
    assert {each.module for each in IMPORTS if package_of(each.target) in LAZY and not each.lazy} == {
        "config.yaml_nodes"
    }


BARE: Final = frozenset(
    {
        "config.problems.BUILT_IN",
        "config.resolve.resolve",
        "loop.sync.sync",
        "report.cells.BAD",
        "report.cells.DIM",
        "report.cells.GOOD",
        "report.cells.STRONG",
        "report.cells.WARN",
        "sampling.disk.statx.BATCH",
        "sampling.hostfs.host.open_host",
        "sampling.snapshot.assemble_snapshot",
    }
)
"""Functions and constants that are imported by name: beside them, a variable has the name of their module."""


def test_functions_and_constants_of_other_modules_are_called_by_their_module() -> None:
    """`rate_limits.take_tokens(...)`, not `take_tokens(...)`: a call shows where its function is.

    Classes, the model and the schema of the configuration are imported by name."""
    wrong = []
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or module == "__main__":
                continue
            source = (node.module or "").removeprefix("nodeagent.")
            if "." not in source or source not in FILES or package_of(source) == "model" or source == "config.schema":
                continue
            for each in node.names:
                full = f"{source}.{each.name}"
                is_class = each.name.lstrip("_")[0].isupper() and not (each.name.isupper() and len(each.name) > 1)
                if full not in FILES and not is_class and full not in BARE:
                    wrong.append(f"{module}:{node.lineno} {full}")
    assert wrong == []
