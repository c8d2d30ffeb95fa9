"""The effective configuration is shown with its origins, and what is shown is read back as the same."""

import pytest

from nodeagent.config import load, show
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import Config
from tests.support.config_files import BAD, GOOD, file, read
from tests.support.paths import REPOSITORY


@pytest.mark.parametrize("body", [*GOOD, "damping: {jitter: 1.0e-05}", "nodeName: 'true'", 'stateDir: "/a \\" #b"'])
def test_what_is_shown_is_read_back_as_the_same_configuration(body: str) -> None:
    loaded = read(body)
    again = load.loads(show.show(loaded))
    assert again.config == loaded.config
    assert again.eviction == loaded.eviction


def test_overrides_are_shown_with_the_flag_or_variable_they_came_from() -> None:
    loaded = load.defaults(overrides=load.overrides_from({"NODE_NAME": "worker-1"}, mode="dry-run"))
    lines = [line.split() for line in show.show(loaded).splitlines()]
    assert ["mode:", '"dry-run"', "#", "--dry-run"] in lines
    assert ["nodeName:", '"worker-1"', "#", "$NODE_NAME"] in lines


def test_each_value_is_shown_with_its_line_or_as_built_in() -> None:
    lines = show.show(read("evictionHard:\n  memory.available: 1Gi\ndamping: {jitter: 0.5}")).splitlines()
    assert ["memory.available:", '"1Gi"', "#", "node.yaml:4"] in [line.split() for line in lines]
    assert ["jitter:", "0.5", "#", "node.yaml:5"] in [line.split() for line in lines]
    assert ["penalty:", "1000", "#", "built-in"] in [line.split() for line in lines]


def test_every_value_but_the_header_has_an_origin() -> None:
    for line in show.show(load.load(str(REPOSITORY / "examples" / "nodeagent.yaml"))).splitlines()[2:]:
        assert line.endswith(":") or "  # " in line


def test_warnings_stand_first_as_comments() -> None:
    loaded = read("evictionHard: {}")
    assert show.show(loaded).startswith("# warning: node.yaml:3:15: evictionHard: there is no threshold")
    assert show.explain_warnings(loaded).startswith("warning: node.yaml:3:15:")
    assert show.explain_warnings(load.defaults()) == ""


def test_problems_are_explained_one_a_line_and_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        load.loads(file("mode: maybe\nstateDir: run"), name="node.yaml")
    assert show.explain_problems(caught.value) == (
        'node.yaml:3:7: mode: "maybe": must be one of dry-run, enforce\n'
        'node.yaml:4:11: stateDir: "run": must be an absolute path\n'
        "2 errors\n"
    )


@pytest.mark.parametrize("wrong", BAD, ids=lambda wrong: wrong.body[:40])
def test_an_explanation_is_printable(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read(getattr(wrong, "body"))  # noqa: B009
    assert all(line.isprintable() for line in show.explain_problems(caught.value).splitlines())


def test_the_default_configuration_is_that_of_the_schema_with_thresholds() -> None:
    loaded = load.defaults()
    assert loaded.config == Config(thresholds=loaded.config.thresholds)
