"""The replicas of wanted owners are read one by one, and no other object."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.owner_lookup import KEEP_S, MAX_OWNERS, REFRESH_S, OwnerReader
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import Owner, OwnerLookup, OwnerReplicas, Pod
from tests.fake_kube import ApiServer
from tests.support import nodes

DB = Owner("StatefulSet", "db", "uid-db")
WEB = Owner("ReplicaSet", "web", "uid-web")
PODS = (nodes.pod("db-0", owner=DB), nodes.pod("web-1", owner=WEB), nodes.pod("bare", owner=None))


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node="lab-node") as server:
        yield server


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))


@pytest.fixture
def reader(transport: Transport, now: list[float]) -> Iterator[OwnerReader]:
    made = OwnerReader(transport, clock=lambda: now[0], backoff=RetryBackoff(first_s=0.01, last_s=0.02))
    yield made
    made.stop()


def put(api: ApiServer, owner: Owner, *, spec: Any, status: Any, generation: int = 1) -> None:
    metadata = {"name": owner.name, "namespace": "shop", "uid": owner.uid, "generation": generation}
    kind = "statefulsets" if owner.kind == "StatefulSet" else "replicasets"
    api.store.put(kind, {"metadata": metadata, "spec": spec, "status": status}, "MODIFIED")


def eventually(holds: Callable[[], object]) -> None:
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    pytest.fail("it never came true")


def known(reader: OwnerReader, pods: tuple[Pod, ...] = PODS) -> list[OwnerReplicas | None]:
    return [pod.replicas for pod in reader.with_replicas(pods)]


def test_nothing_is_requested_before_an_owner_is_wanted(api: ApiServer, reader: OwnerReader) -> None:
    assert reader.with_replicas(PODS) is PODS
    assert not api.requests


def test_only_the_wanted_owners_are_read(api: ApiServer, reader: OwnerReader) -> None:
    put(api, DB, spec={"replicas": 3}, status={"readyReplicas": 2, "observedGeneration": 1})
    reader.want([OwnerLookup("shop", DB)])
    eventually(lambda: (found := known(reader)[0]) is not None and found.read_at)
    assert known(reader) == [OwnerReplicas(100.0, 100.0, 3, 2, 100.0), None, None]
    assert {request.path for request in api.requests} == {"/apis/apps/v1/namespaces/shop/statefulsets/db"}
    assert reader.with_replicas(PODS) is reader.with_replicas(PODS), "a call in every sync costs nothing"


@pytest.mark.parametrize(
    ("spec", "status", "expected"),
    [
        ({"replicas": 2}, {"readyReplicas": 2, "observedGeneration": 1}, (2, 2)),
        ({}, {"observedGeneration": 1}, (1, 0)),
        ({"replicas": 0}, {"observedGeneration": 1}, (0, 0)),
        ({"replicas": 2}, {"readyReplicas": 2, "observedGeneration": 0}, (2, 0)),
    ],
    ids=["complete", "defaults", "scaled to none", "the controller has not seen this version"],
)
def test_what_the_status_means(api: ApiServer, reader: OwnerReader, spec: Any, status: Any, expected: Any) -> None:
    put(api, WEB, spec=spec, status=status)
    reader.want([OwnerLookup("shop", WEB)])
    eventually(lambda: (found := known(reader)[1]) is not None and found.read_at)
    found = known(reader)[1]
    assert found is not None
    assert (found.desired, found.ready) == expected
    assert (found.incomplete_since is None) is (found.ready >= found.desired)


def test_a_wanted_owner_is_read_again_and_keeps_the_time_since_when_it_lacks_replicas(
    api: ApiServer, reader: OwnerReader, now: list[float]
) -> None:
    lookup = OwnerLookup("shop", DB)
    put(api, DB, spec={"replicas": 3}, status={"readyReplicas": 2, "observedGeneration": 1})

    def read_at(at: float) -> bool:
        reader.want([lookup])
        found = known(reader)[0]
        return found is not None and found.read_at == at

    eventually(lambda: read_at(100.0))
    now[0] += REFRESH_S + 1
    reader._condition.acquire()
    reader._condition.notify_all()
    reader._condition.release()
    eventually(lambda: read_at(now[0]))
    assert known(reader)[0] == OwnerReplicas(100.0, now[0], 3, 2, 100.0)


def test_a_failure_is_the_reason_and_what_was_read_stays(api: ApiServer, reader: OwnerReader) -> None:
    reader.want([OwnerLookup("shop", DB)])
    eventually(lambda: reader.reason)
    found = known(reader)[0]
    assert found is not None
    assert (found.read_at, found.asked_at) == (None, 100.0)
    assert "not found" in found.trouble
    assert reader.reason == found.trouble


def test_another_object_of_the_same_name_is_not_the_owner(api: ApiServer, reader: OwnerReader) -> None:
    put(api, DB._replace(uid="another"), spec={"replicas": 1}, status={"readyReplicas": 1, "observedGeneration": 1})
    reader.want([OwnerLookup("shop", DB)])
    eventually(lambda: reader.reason == "another object has its name now")
    found = known(reader)[0]
    assert found is not None
    assert found.read_at is None


def test_a_right_that_is_missing_is_named(api: ApiServer, reader: OwnerReader) -> None:
    api.forbid("get", "statefulsets")
    reader.want([OwnerLookup("shop", DB)])
    eventually(lambda: "statefulsets" in reader.reason)


def test_owners_that_are_not_wanted_any_more_are_dropped(api: ApiServer, reader: OwnerReader, now: list[float]) -> None:
    reader.want([OwnerLookup("shop", DB)])
    eventually(lambda: known(reader)[0])
    now[0] += KEEP_S + 1
    reader.want([OwnerLookup("shop", WEB)])
    assert known(reader)[0] is None
    assert known(reader)[1] is not None


def test_the_number_of_owners_is_bounded(api: ApiServer, reader: OwnerReader) -> None:
    many = [OwnerLookup("shop", Owner("ReplicaSet", f"r{number}", f"u{number}")) for number in range(3 * MAX_OWNERS)]
    reader.want(many)
    pods = tuple([nodes.pod(f"p{number}", owner=each.owner) for number, each in enumerate(many)])
    assert len([each for each in known(reader, pods) if each is not None]) == MAX_OWNERS
