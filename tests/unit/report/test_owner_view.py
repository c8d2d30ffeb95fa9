"""An eviction in words for the owner of the pod."""

from pathlib import Path

import pytest

from nodeagent.config.schema import Config
from nodeagent.model import QOSClass
from nodeagent.report import owner_view, recorded_decisions, stories, text
from nodeagent.report.owner_view import OwnerView
from tests.support import incident, nodes
from tests.support.nodes import GI, MI


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> incident.Incident:
    return incident.record(tmp_path_factory.mktemp("records"))


def view(
    made: incident.Incident, *, config: Config | None = incident.CONFIG, pod: str = "shop/batch", samples: bool = True
) -> OwnerView | None:
    decisions = recorded_decisions.read_decisions(made.directory)
    own = recorded_decisions.find_decision(decisions, made.plan.id)
    story = stories.build(own, decisions, made.samples if samples else ())
    return owner_view.view(story, pod, config=config)


def rendered(found: OwnerView | None) -> str:
    assert found is not None
    return text.render(owner_view.sections(found))


def test_it_is_told_what_the_pod_used_and_asked_for_and_what_was_left(made: incident.Incident) -> None:
    output = rendered(view(made))
    assert "Pod shop/batch of ReplicaSet/batch\n" in output
    assert "because the node was low on memory: 1.98Gi of 16Gi were left, and pods are evicted below 2Gi.\n" in output
    assert "It used 5.52Gi of memory, 5.02Gi more than its request of 512Mi.\n" in output
    assert "from 512Mi to 5.52Gi in the 1m 26s before\n" in output
    assert "No other pod used more memory than it.\n2 of 3 pods used more memory than they requested.\n" in output


def test_it_is_told_that_it_grew_if_pods_before_it_were_spared(tmp_path: Path) -> None:
    idle = nodes.view("idle", 150 * MI, qos=QOSClass.BEST_EFFORT)
    found = view(incident.record(tmp_path, beside=(idle,)))
    output = rendered(found)
    assert (
        "It grew, and would soon have used up what one pod before it in the order of eviction would have freed.\n"
        "It has its place in that order because of: Burstable; over its request of 512Mi;"
    ) in output
    assert "came first" not in output
    assert found is not None
    assert owner_view.to_json(found)["podsSpared"] == 1


def test_the_request_that_keeps_it_is_the_exact_one(made: incident.Incident) -> None:
    found = view(made)
    assert found is not None
    assert found.kept is not None
    assert found.kept.request is not None
    assert (
        f"A memory request of {found.kept.request // MI}Mi or more, instead of 512Mi: shop/web would have"
        in rendered(found)
    )


def test_pods_of_other_namespaces_are_numbers_for_an_owner_and_names_for_an_operator(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = incident.record(tmp_path_factory.mktemp("records"), namespace="lab")
    found = view(made, pod="lab/batch")
    output = rendered(found)
    assert "shop/" not in output
    assert "1 pod of another namespace would have been evicted instead." in output
    assert found is not None
    assert "shop/web would have been evicted instead." in owner_view.advice(found, names=True)[0]


def test_without_the_configuration_in_force_there_is_no_advice_and_the_reason(made: incident.Incident) -> None:
    assert "Not known: the configuration that was in force is not recorded." in rendered(view(made, config=None))
    other = nodes.config(nodes.hard(value=GI))
    assert "Not known: with this configuration the decision does not evict the pod again" in rendered(
        view(made, config=other)
    )


def test_without_samples_the_curve_is_left_out(made: incident.Incident) -> None:
    found = view(made, samples=False)
    assert found is not None
    assert found.curve == ""
    assert "It used 5.52Gi of memory" in rendered(found)


def test_a_pod_that_was_no_victim_has_no_view(made: incident.Incident) -> None:
    assert view(made, pod="shop/web") is None


def test_programs_get_amounts_and_sentences(made: incident.Incident) -> None:
    found = view(made)
    assert found is not None
    made_json = owner_view.to_json(found)
    assert made_json["kind"] == "OwnerReport"
    assert (made_json["request"], made_json["podsOnNode"], made_json["podsUsingMore"]) == (512 * MI, 3, 0)
    assert made_json["requestThatKeepsIt"]["verdict"] == "kept"
    assert made_json["advice"] == list(owner_view.advice(found))
