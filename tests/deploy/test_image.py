"""The image is built from what is pinned. That it builds and runs is for tests/vm/test_container.py to show."""

import re
import tomllib
from importlib.metadata import requires
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import REPOSITORY
from tests.vm.dockerfile import BASE_IMAGE, instructions

STEPS: Final = instructions((REPOSITORY / "Dockerfile").read_text(encoding="utf-8"))
PINS: Final = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^(\S+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
}


def declared() -> list[Requirement]:
    with (REPOSITORY / "pyproject.toml").open("rb") as stream:
        return [Requirement(line) for line in tomllib.load(stream)["project"]["dependencies"]]


def everything_needed() -> set[str]:
    """Names of the dependencies, and of what they need."""
    found: set[str] = set()
    coming = [each.name for each in declared()]
    while coming:
        name = canonicalize_name(coming.pop())
        if name not in found:
            found.add(name)
            needs = [Requirement(line) for line in requires(name) or ()]
            coming += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def test_the_image_is_made_from_one_base_that_a_build_can_pin_and_contains_no_other() -> None:
    assert STEPS[0] == ("ARG", f"BASE={BASE_IMAGE}")
    bases = [rest.partition(" AS ")[0] for name, rest in STEPS if name == "FROM"]
    assert bases == ["${BASE}", "scratch"]


def test_nothing_in_the_recipe_is_of_one_architecture() -> None:
    for name, rest in STEPS:
        assert not re.search(r"amd64|x86_64|x86-64|arm64|aarch64|lib64", rest), (name, rest)


def test_whatever_pip_installs_has_an_exact_version() -> None:
    installs = [line for name, rest in STEPS if name == "RUN" for line in rest.split("&&") if "pip install" in line]
    assert len(installs) == 2
    for line in installs:
        assert re.search(r"'pip==[\d.]+'|--constraint /src/constraints.txt /src$", line.strip()), line
    assert everything_needed() - PINS.keys() == set()


def test_the_pinned_versions_are_those_that_the_project_accepts() -> None:
    for each in declared():
        assert each.specifier.contains(PINS[canonicalize_name(each.name)]), each
