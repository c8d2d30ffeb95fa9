"""The Markdown document of a decision."""

import re

import pytest

from nodeagent.report import owner_view, post_mortem, recorded_decisions, stories
from nodeagent.report.recorded_decisions import RecordedDecision
from tests.support import incident


def document(made: incident.Incident, *, samples: bool = True, configuration: str = "mode: enforce\n") -> str:
    decisions = recorded_decisions.read_decisions(made.directory)
    own = recorded_decisions.find_decision(decisions, made.plan.id)
    story = stories.build(
        own, decisions, made.samples if samples else (), missing="the recorder is off", configuration=configuration
    )
    pod = f"{made.plan.victims[0].pod.namespace}/{made.plan.victims[0].pod.name}"
    view = owner_view.view(story, pod, config=incident.CONFIG)
    assert view is not None
    return post_mortem.document(story, [view])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> incident.Incident:
    return incident.record(tmp_path_factory.mktemp("records"))


HEADINGS = [
    "# Eviction of shop/batch, 2027-01-15T08:01:26.000Z",
    "## Summary",
    "## Timeline",
    "## Impact",
    "## The minutes before",
    "## Ranking",
    "## Configuration in force",
    "## What would have changed it",
]


def test_it_has_every_part_once_and_in_order(made: incident.Incident) -> None:
    assert re.findall(r"^#+ .*$", document(made), re.MULTILINE) == HEADINGS


def test_the_parts_have_the_facts(made: incident.Incident) -> None:
    text = document(made)
    assert "* **Done**: shop/batch: accepted (HTTP 201) after 17ms\n" in text
    assert "| 2027-01-15T08:01:26.000Z | 0s | this decision: evict shop/batch |\n" in text
    assert "| shop/batch | ReplicaSet/batch | Burstable | evict | 1s | 5.52Gi | accepted |\n" in text
    assert "* Closest approach of memory.available: 1.87Gi\n" in text
    assert "* MemoryPressure was True for 2m 50s and longer\n" in text
    assert "| 1 | shop/batch | 5.52Gi | 512Mi | 5.52Gi | evicted | Burstable; over its request of 512Mi;" in text
    assert "```yaml\nmode: enforce\n```\n" in text
    assert "* shop/batch: A memory request of 5650Mi or more, instead of 512Mi: shop/web would have" in text


def test_what_is_not_recorded_is_stated(made: incident.Incident) -> None:
    text = document(made, samples=False, configuration="")
    assert re.findall(r"^#+ .*$", text, re.MULTILINE) == HEADINGS
    assert "* **Not recorded**: the recorder is off\n" in text
    assert "## The minutes before\n\nthe recorder is off.\n" in text
    assert "## Configuration in force\n\nIt is not recorded.\n" in text


def test_hostile_names_are_no_markup(tmp_path_factory: pytest.TempPathFactory) -> None:
    hog = "<img src=x>|[a](http://e.example)\n# b"
    text = document(incident.record(tmp_path_factory.mktemp("records"), hog=hog))
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"(?<!\\)<img|(?<!\\)\[a|http://", outside)


@pytest.mark.parametrize(
    "record",
    [
        {"record": "oom", "kills": [{"pod": "shop/web", "number": 1, "cause": "node"}], "race": {"loss": "too late"}},
        {"record": "decision", "refusals": [{"code": "futile", "message": "no"}, {"code": "of-tomorrow"}]},
        {"record": "decision", "victims": [{"uid": 3}, 7], "ranking": [{"rank": None}], "wallTime": "x"},
        {},
    ],
)
def test_every_kind_of_record_is_a_document(record: dict[str, object]) -> None:
    own = RecordedDecision("x", {"wallTime": 1.0, **record} if record else {})
    text = post_mortem.document(stories.build(own, [own], ()))
    assert text.startswith("# ")
    assert "## Impact" in text
