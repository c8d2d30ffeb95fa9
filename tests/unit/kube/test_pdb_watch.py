"""PodDisruptionBudgets are watched in the namespaces that a decision wants, and in no other."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nodeagent.kube import objects
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.pdb_watch import FIRST_LIST_S, NAMESPACE_KEEP_S, PdbWatch, selects
from nodeagent.kube.pod_decoder import decode_pod
from nodeagent.kube.transport import connect
from nodeagent.model import DisruptionBudget, Pod
from tests.fake_kube import ApiServer, pod


def a_pod(name: str = "p", *, namespace: str = "default", **labels: str) -> Pod:
    return decode_pod(json.dumps(pod(name, namespace=namespace, labels=labels)).encode())


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def pdbs(api: ApiServer, tmp_path: Path, now: list[float]) -> Iterator[PdbWatch]:
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    watch = PdbWatch(transport, clock=lambda: now[0])
    yield watch
    watch.stop()


def eventually(holds: Callable[[], object]) -> None:
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    pytest.fail("it never came true")


def _wait(event: threading.Event) -> None:
    event.wait(60)


def pdbs_of(pdbs: PdbWatch, candidate: Pod) -> tuple[DisruptionBudget, ...]:
    return pdbs.with_pdbs((candidate,))[0].disruption_budgets


def test_nothing_is_listed_before_a_namespace_is_wanted(api: ApiServer, pdbs: PdbWatch) -> None:
    assert pdbs_of(pdbs, a_pod(app="a")) == ()
    assert not api.requests
    pdbs.want(["default"])
    assert api.wait_for(lambda: [r for r in api.requests if "watch" in r.query], 30)
    assert {r.path for r in api.requests} == {"/apis/policy/v1/namespaces/default/poddisruptionbudgets"}


def test_a_first_list_is_waited_for_but_not_for_ever(api: ApiServer, pdbs: PdbWatch, now: list[float]) -> None:
    answered = threading.Event()
    api.at_request = lambda _request, _done: _wait(answered)
    assert pdbs.unlisted_namespace() == ""
    pdbs.want(["default"])
    assert pdbs.unlisted_namespace() == "default"
    now[0] += FIRST_LIST_S + 1.0
    assert pdbs.unlisted_namespace() == ""
    now[0] -= FIRST_LIST_S
    assert pdbs.unlisted_namespace() == "default"
    answered.set()
    eventually(lambda: pdbs.unlisted_namespace() == "")


def test_a_pod_has_the_pdbs_that_select_it_and_their_changes(api: ApiServer, pdbs: PdbWatch) -> None:
    api.set_pdb("b", {"app": "a"}, allowed=1)
    api.set_pdb("elsewhere", {"app": "a"}, allowed=1, namespace="other")
    pdbs.want(["default"])
    eventually(lambda: pdbs_of(pdbs, a_pod(app="a")) == (DisruptionBudget("b", 1, True),))
    assert pdbs_of(pdbs, a_pod(app="z")) == ()
    assert pdbs_of(pdbs, a_pod(app="a", namespace="other")) == ()
    with api.store.changed:
        pdb = api.store.objects["poddisruptionbudgets"]["default", "b"]
        pdb["status"]["disruptionsAllowed"] = 0
        api.store.record("poddisruptionbudgets", pdb, "MODIFIED")
    eventually(lambda: pdbs_of(pdbs, a_pod(app="a")) == (DisruptionBudget("b", 0, True),))


@pytest.mark.parametrize(
    ("policy", "healthy", "needed", "allowed"),
    [
        (None, 2, 2, True),
        ("IfHealthyBudget", 2, 2, True),
        ("IfHealthyBudget", 1, 2, False),
        ("IfHealthyBudget", 0, 0, False),
        ("AlwaysAllow", 0, 2, True),
    ],
)
def test_a_pdb_lets_pods_that_are_not_ready_go_where_the_api_server_does(
    api: ApiServer, pdbs: PdbWatch, policy: str | None, healthy: int, needed: int, allowed: bool
) -> None:
    """The rows of tests/fake_kube/test_contract.py."""
    entry = api.set_pdb("b", {"app": "a"}, allowed=0, healthy=healthy, needed=needed)
    if policy is not None:
        entry["spec"]["unhealthyPodEvictionPolicy"] = policy
    pdbs.want(["default"])
    eventually(lambda: pdbs_of(pdbs, a_pod(app="a")) == (DisruptionBudget("b", 0, allowed),))


def test_a_pdb_that_is_not_observed_yet_allows_nothing(api: ApiServer, pdbs: PdbWatch) -> None:
    api.set_pdb("b", {"app": "a"}, allowed=3, observed=False)
    pdbs.want(["default"])
    eventually(lambda: pdbs_of(pdbs, a_pod(app="a")) == (DisruptionBudget("b", 0, True),))


def test_a_namespace_that_is_not_wanted_any_more_is_dropped(api: ApiServer, pdbs: PdbWatch, now: list[float]) -> None:
    api.set_pdb("b", {"app": "a"}, allowed=1)
    pdbs.want(["default"])
    eventually(lambda: pdbs_of(pdbs, a_pod(app="a")))
    now[0] += NAMESPACE_KEEP_S + 1
    pdbs.want([])
    assert pdbs_of(pdbs, a_pod(app="a")) == ()


def test_missing_rights_are_a_note(api: ApiServer, pdbs: PdbWatch) -> None:
    api.forbid("list", "poddisruptionbudgets")
    pdbs.want(["default"])
    eventually(lambda: any("forbidden" in note.message for note in pdbs.notes()))


@pytest.mark.parametrize(
    ("selector", "labels", "selected"),
    [
        (None, {"a": "1"}, False),
        ({}, {}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "1", "b": "2"}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "2"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, {"a": "2"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {"a": "1"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {"a": ""}, False),
        ({"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "b", "operator": "Exists"}]}, {"a": "1"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Later"}]}, {}, True),
    ],
)
def test_selectors_work_as_policy_v1_defines(selector: Any, labels: dict[str, str], selected: bool) -> None:
    decoded = None if selector is None else msgspec.convert(selector, objects.LabelSelector)
    assert selects(decoded, a_pod(**labels)) is selected
