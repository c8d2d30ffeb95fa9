"""The node's pods are listed, watched and kept current, whatever the server sends."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import DecodeError

from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.list_stream import MAX_PAGES
from nodeagent.kube.pod_decoder import decode_pod, with_mirrors_of
from nodeagent.kube.pod_watch import DELETED_S, SPREAD_S, PodsView, PodWatch, list_pods
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import ContainerKind, Owner, Pod, PodSource, QOSClass, Resources
from nodeagent.runtime.clock import boottime
from tests.fake_kube import Answer, ApiServer, Request, pod
from tests.support.livenode import until
from tests.support.paths import RECORDINGS
from tests.support.rawserver import CHUNKED, RawServer, chunk, read_request, response

Json = dict[str, Any]

FAST = 0.01
"""First back-off in these tests: seconds."""


def connected(server: ApiServer | RawServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(server.kubeconfig(tmp_path / "kubeconfig"))))


class Watched:
    """A PodWatch and the changes it announced."""

    def __init__(
        self,
        transport: Transport,
        *,
        idle_s: float = 30.0,
        watch_s: float = 300.0,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self.changed = threading.Condition()
        self.watch = PodWatch(
            transport,
            "lab-node",
            wake=self._wake,
            idle_s=idle_s,
            watch_s=watch_s,
            clock=clock,
            backoff=RetryBackoff(first_s=FAST, last_s=0.1, rng=random.Random(1)),
        )
        self.watch.start()

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def until(self, holds: Callable[[PodsView], object], timeout_s: float = 30.0) -> PodsView:
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self.watch.view()), timeout_s), self.watch.view()
            return self.watch.view()


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(pods=[pod("one"), pod("two"), pod("elsewhere", node="other")], linger_s=0.05) as server:
        yield server


@pytest.fixture
def watched(api: ApiServer, tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(connected(api, tmp_path))
    watched.until(lambda view: view.synced_at)
    yield watched
    watched.watch.stop()


def names(view: PodsView) -> set[str | None]:
    return {p.name for p in view.pods}


# --- one pod ---------------------------------------------------------------------------------------------------------


def recorded_pods() -> dict[str, Pod]:
    record = json.loads((RECORDINGS / "list-pods-fieldselector.json").read_text())
    items = json.loads(record["response"]["body"])["items"]
    return {p["metadata"]["name"]: decode_pod(json.dumps(p).encode()) for p in items}


def test_recorded_pods_are_decoded() -> None:
    pods = recorded_pods()
    quiet = pods["quiet"]
    assert (quiet.namespace, quiet.qos_class, quiet.phase) == ("default", QOSClass.BEST_EFFORT, "Running")
    assert (quiet.priority, quiet.termination_grace_s, quiet.ready) == (0, 5.0, True)
    assert quiet.containers[0].running
    assert len(quiet.containers[0].container_id) == 64
    owner = pods["ds-hog-z4fp8"].owner
    assert owner == Owner("DaemonSet", "ds-hog", "b892f5c6-6ee6-4ae0-8988-74b9e958ce16")
    guaranteed = pods["hog-guaranteed"]
    assert guaranteed.qos_class is QOSClass.GUARANTEED
    assert guaranteed.containers[0].requests == guaranteed.containers[0].limits
    assert guaranteed.containers[0].requests.memory
    assert all(p.source is PodSource.API for p in pods.values())


def read(**fields: Any) -> Pod:
    return decode_pod(json.dumps(pod("p", **fields)).encode())


HASH = "40752f5e63399d9c92ea85f4b6e74059"
OWN_NODE: Json = {"apiVersion": "v1", "kind": "Node", "name": "lab-node", "uid": "node-uid", "controller": True}


def mirror(owner: Json | None = None, **annotations: str) -> Pod:
    """A mirror pod as a kubelet creates it (NodeRestriction requires that owner reference), with changes."""
    entry = pod("etcd-lab-node", namespace="kube-system", uid="u")
    marks = {"config.mirror": HASH, "config.hash": HASH, "config.source": "file"} | annotations
    entry["metadata"] |= {
        "resourceVersion": "7",
        "annotations": {f"kubernetes.io/{key}": value for key, value in marks.items() if value},
        "ownerReferences": [OWN_NODE | (owner or {})],
    }
    return decode_pod(json.dumps(entry).encode())


def test_a_mirror_pod_has_the_owner_and_the_hashes_that_a_kubelet_writes() -> None:
    assert (mirror().mirror_of, mirror().cgroup_uid) == (HASH, "u"), "which the host has to confirm"
    for change in ({"config.hash": ""}, {"config.hash": "other"}, {"config.mirror": ""}, {"config.mirror": "other"}):
        assert mirror(None, **change).mirror_of == "", change
    for owner in ({"name": "other"}, {"kind": "ReplicaSet"}, {"apiVersion": "apps/v1"}, {"controller": None}):
        assert mirror(owner).mirror_of == "", owner
    assert mirror(None, **dict.fromkeys(("config.mirror", "config.hash"), "")).mirror_of == ""
    assert read(annotations={"kubernetes.io/config.mirror": HASH, "kubernetes.io/config.hash": HASH}).mirror_of == ""


def test_a_mirror_pod_of_another_node_object_is_an_ordinary_pod_once_the_uid_is_known() -> None:
    ours, earlier, other = mirror(), mirror({"uid": "earlier"}), read(uid="o")
    assert [each.mirror_of for each in with_mirrors_of((ours, earlier, other), "node-uid")] == [HASH, "", ""]
    pods = (ours, other)
    assert with_mirrors_of(pods, "node-uid") is pods


def test_static_pods_are_in_a_kubelets_list_and_not_in_an_api_servers() -> None:
    """From the `/pods` of a real kubelet."""
    items = json.loads((RECORDINGS.parent / "cluster" / "kubelet-pods.json").read_text())["items"]
    listed = {p["metadata"]["name"]: decode_pod(json.dumps(p).encode()) for p in items}
    assert {name for name, each in listed.items() if each.static} == {"static-hog-lab-node"}
    assert listed["static-hog-lab-node"].static == "file"
    # The same as a pod of an API server, whose author can write any annotation, later even its own UID.
    [static] = [p for p in items if p["metadata"]["name"] == "static-hog-lab-node"]
    static["metadata"]["resourceVersion"] = "7"
    assert decode_pod(json.dumps(static).encode()).static == ""


def test_a_missing_qos_class_follows_from_the_resources() -> None:
    """An empty `resources` of the pod does not count: its containers decide (docs/kubelet-differences.md, Q13)."""
    amounts = {"cpu": "100m", "memory": "1Mi"}
    spec = {"containers": [{"name": "c", "resources": {"requests": amounts, "limits": amounts}}]}
    for pod_level, expected in ((None, QOSClass.GUARANTEED), ({}, QOSClass.GUARANTEED)):
        manifest = {"metadata": {"uid": "u"}, "spec": {**spec, "resources": pod_level}}
        assert decode_pod(json.dumps(manifest).encode()).qos_class is expected
    manifest = {"metadata": {"uid": "u"}, "spec": {**spec, "resources": {"requests": {"memory": "1Mi"}}}}
    assert decode_pod(json.dumps(manifest).encode()).qos_class is QOSClass.BURSTABLE


def test_only_annotations_that_decisions_read_are_kept() -> None:
    annotations = {
        "kubectl.kubernetes.io/last-applied-configuration": "x" * 1000,
        "nodeagent.io/evict": "never",
        "controller.kubernetes.io/pod-deletion-cost": "5",
        "mine": "yes",
    }
    kept = decode_pod(
        json.dumps(pod("p", annotations=annotations)).encode(), annotations=frozenset({"mine"})
    ).annotations
    assert set(kept) == {"nodeagent.io/evict", "mine"}
    assert set(read(annotations=annotations).annotations) == {
        "nodeagent.io/evict",
        "controller.kubernetes.io/pod-deletion-cost",
    }


def test_amounts_are_whole_numbers_rounded_up() -> None:
    requests = {"cpu": "0.5", "memory": "1.5Gi", "ephemeral-storage": 1000, "hugepages-2Mi": "2Mi"}
    assert read(requests=requests).containers[0].requests == Resources(500, 1536 << 20, 1000, others=True)


def test_every_kind_of_container_is_distinguished() -> None:
    spec = {"initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}]}
    kinds = {c.name: c.kind for c in read(spec=spec).containers}
    assert kinds == {"c": ContainerKind.REGULAR, "i": ContainerKind.INIT, "s": ContainerKind.SIDECAR}


@pytest.mark.parametrize("spec", [{}, {"hostPID": False}, {"hostPID": True}])
def test_a_pod_with_host_pid_is_decoded(spec: dict[str, bool]) -> None:
    decoded = decode_pod(json.dumps(pod("web", spec=spec)).encode())
    assert decoded.host_pid == spec.get("hostPID", False)


def test_a_pod_with_ephemeral_containers_is_decoded() -> None:
    one = pod("web", spec={"ephemeralContainers": [{"name": "debugger", "image": "x"}]})
    decoded = decode_pod(json.dumps(one).encode())
    assert decoded.ephemeral
    assert [container.name for container in decoded.containers] == ["c"]
    assert not decode_pod(json.dumps(pod("web")).encode()).ephemeral


def test_the_state_of_a_resize_is_decoded() -> None:
    status = {
        "containerStatuses": [
            {"name": "c", "allocatedResources": {"memory": "2Mi"}, "resources": {"limits": {"memory": "3Mi"}}}
        ],
        "conditions": [{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}],
    }
    found = read(requests={"memory": "1Mi"}, status=status)
    container = found.containers[0]
    assert container.requests.memory == 1 << 20
    assert container.allocated == Resources(memory=2 << 20)
    assert container.actual_limits == Resources(memory=3 << 20)
    assert found.resize_infeasible


@pytest.mark.parametrize(
    ("reported", "allocated"),
    [
        ({"resources": {"requests": {"cpu": "10m", "memory": "2Mi"}}}, Resources(10, 2 << 20)),
        ({"resources": {"requests": {"cpu": "10m"}}}, Resources(10)),
        ({"resources": {}}, Resources()),
        ({}, None),
    ],
)
def test_without_allocated_resources_what_a_container_runs_with_counts(
    reported: dict[str, Any], allocated: Resources | None
) -> None:
    """Kubernetes 1.33 and 1.34 report no allocatedResources by default."""
    status = {"containerStatuses": [{"name": "c", **reported}]}
    assert read(requests={"memory": "7Ei"}, status=status).containers[0].allocated == allocated


def test_a_resize_of_the_pod_itself_counts_when_it_is_allocated() -> None:
    spec = {"resources": {"requests": {"memory": "2Gi"}}}
    for status in (
        {"allocatedResources": {"memory": "50Mi"}, "resources": {"requests": {"memory": "40Mi"}}},
        {"resources": {"requests": {"memory": "50Mi"}}},
    ):
        assert read(spec=spec, status=status).pod_requests == Resources(memory=50 << 20)
    assert read(spec=spec).pod_requests == Resources(memory=2 << 30)
    assert read(status={"resources": {"requests": {"memory": "50Mi"}}}).pod_requests is None


def test_volumes_in_memory_are_distinguished_from_those_on_disk() -> None:
    volumes = [
        {"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "d", "emptyDir": {}},
        {"name": "s", "secret": {"secretName": "x"}},
    ]
    dirs = read(spec={"volumes": volumes}).empty_dirs
    assert [(d.name, d.memory_backed, d.size_limit) for d in dirs] == [("m", True, 1 << 30), ("d", False, None)]


@pytest.mark.parametrize(
    ("source", "elsewhere"),
    [
        ({"emptyDir": {}}, False),
        ({"configMap": {"name": "c"}}, False),
        ({"secret": {"secretName": "s"}}, False),
        ({"projected": {"sources": []}}, False),
        ({"downwardAPI": {}}, False),
        ({"gitRepo": {"repository": "r"}}, False),
        ({"image": {"reference": "i"}}, False),
        ({"hostPath": {"path": "/data"}}, True),
        ({"persistentVolumeClaim": {"claimName": "c"}}, True),
        ({"ephemeral": {"volumeClaimTemplate": {}}}, True),
        ({"csi": {"driver": "d"}}, True),
        ({"nfs": {"server": "n", "path": "/"}}, True),
    ],
)
def test_a_volume_that_is_not_local_storage_is_known_by_its_source(source: dict[str, Any], elsewhere: bool) -> None:
    volumes = [{"name": "m", "emptyDir": {}}, {"name": "v", **source}]
    assert read(spec={"volumes": volumes}).writes_elsewhere is elsewhere


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["metadata", "spec", "status"]), st.data())
def test_whatever_a_field_contains_a_pod_is_decoded_or_refused(section: str, data: st.DataObject) -> None:
    entry = pod("p", owner=("ReplicaSet", "r"), requests={"memory": "1Mi"})
    key = data.draw(st.sampled_from(sorted(entry[section])))
    entry[section][key] = data.draw(JSON_VALUES)
    try:
        found = decode_pod(json.dumps(entry).encode())
    except (DecodeError, ValueError):
        return
    assert isinstance(found, Pod)
    assert found.uid


# --- list and watch --------------------------------------------------------------------------------------------------


def test_a_single_list_has_this_nodes_pods_and_its_time(api: ApiServer, tmp_path: Path) -> None:
    view = list_pods(connected(api, tmp_path), "lab-node")
    assert names(view) == {"one", "two"}
    assert view.synced_at is not None


def test_pods_are_added_changed_and_removed_by_the_watch(api: ApiServer, watched: Watched) -> None:
    api.add_pod(pod("three"))
    watched.until(lambda view: names(view) == {"one", "two", "three"})
    api.modify_pod("default", "one", lambda p: p["status"].update(phase="Failed"))
    watched.until(lambda view: any(p.phase == "Failed" for p in view.pods))
    api.delete_pod("default", "two")
    assert watched.until(lambda view: names(view) == {"one", "three"}).reason == ""
    assert watched.watch.relists == 1


def test_a_new_pod_with_the_same_name_is_another_pod(api: ApiServer, watched: Watched) -> None:
    before = watched.watch.view().pods
    api.delete_pod("default", "one")
    api.add_pod(pod("one"))
    after = watched.until(lambda view: {p.uid for p in view.pods} != {p.uid for p in before} and len(view.pods) == 2)
    assert names(after) == {"one", "two"}


def test_a_watch_that_the_server_ends_continues_from_its_version(api: ApiServer, watched: Watched) -> None:
    assert api.wait_for(lambda: [r for r in api.requests if "watch" in r.query])
    api.end_watches()
    assert api.wait_for(lambda: len([r for r in api.requests if "watch" in r.query]) == 2)
    api.add_pod(pod("three"))
    watched.until(lambda view: len(view.pods) == 3)
    assert watched.watch.relists == 1
    assert watched.watch.failures == 0


def test_a_version_that_is_too_old_is_answered_with_a_new_list(api: ApiServer, watched: Watched) -> None:
    assert api.wait_for(lambda: [r for r in api.requests if "watch" in r.query])
    with api.store.changed:
        api.compact()
        api.store.objects["pods"].pop(("default", "one"))
        api.end_watches()
    watched.until(lambda view: names(view) == {"two"})
    assert watched.watch.relists == 2
    lists = [r for r in api.requests if "watch" not in r.query]
    assert lists[0].query["resourceVersion"] == "0"
    assert "resourceVersion" not in lists[1].query, "after a 410 the cache may be what is behind"


def test_a_version_that_the_server_cannot_use_is_answered_with_a_new_list(api: ApiServer, tmp_path: Path) -> None:
    """A list of a broken server or proxy: a watch from its version gets the recorded 500, however often it is sent."""
    broken = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "x"}, "items": []}
    lists = iter([Answer(200, broken)])
    api.instead = lambda request: None if "watch" in request.query else next(lists, None)
    watched = Watched(connected(api, tmp_path))
    watched.until(lambda view: names(view) == {"one", "two"})
    watched.watch.stop()
    versions = [request.query.get("resourceVersion") for request in api.requests if "watch" in request.query]
    assert versions[0] == "x"


def test_long_lists_come_in_pages(api: ApiServer, tmp_path: Path) -> None:
    for n in range(7):
        api.add_pod(pod(f"more-{n}"))
    api.forbid("list", "nothing")
    page = json.loads(connected(api, tmp_path).request("GET", "/api/v1/pods?limit=3").body)
    assert page["metadata"]["continue"]


def test_a_bookmark_keeps_an_unchanged_view_current(tmp_path: Path) -> None:
    with ApiServer(pods=[pod("one")], bookmark_s=0.05) as api:
        watched = Watched(connected(api, tmp_path))
        first = watched.until(lambda view: view.synced_at).synced_at
        assert first is not None
        watched.until(lambda view: view.synced_at is not None and view.synced_at > first + 0.1)
        watched.watch.stop()


def test_an_unreadable_pod_is_left_out_with_a_note_and_other_pods_stay(api: ApiServer, watched: Watched) -> None:
    bad = pod("bad")
    bad["spec"]["priority"] = "high"
    api.add_pod(bad)
    view = watched.until(lambda view: view.notes)
    assert names(view) == {"one", "two"}
    assert "default/bad" in view.notes[0].subject
    api.modify_pod("default", "bad", lambda p: p["spec"].update(priority=1))
    assert names(watched.until(lambda view: not view.notes)) == {"one", "two", "bad"}


def test_an_unreadable_pod_in_a_list_affects_no_other_pod(api: ApiServer, tmp_path: Path) -> None:
    for n, (section, key, value) in enumerate([("metadata", "uid", ""), ("status", "qosClass", "Best")]):
        bad = pod(f"bad-{n}")
        bad[section][key] = value
        api.add_pod(bad)
    view = list_pods(connected(api, tmp_path), "lab-node")
    assert names(view) == {"one", "two"}
    assert len(view.notes) == 2


# --- trouble ---------------------------------------------------------------------------------------------------------


def test_missing_rights_are_reported_until_they_are_granted(api: ApiServer, tmp_path: Path) -> None:
    api.forbid("list", "pods")
    watched = Watched(connected(api, tmp_path))
    view = watched.until(lambda view: "forbidden" in view.reason)
    assert view.synced_at is None
    api.allow("list", "pods")
    assert names(watched.until(lambda view: view.synced_at)) == {"one", "two"}
    watched.watch.stop()


def test_a_silent_watch_is_noticed_and_restarted(tmp_path: Path) -> None:
    def silent(connection: socket.socket, number: int) -> None:
        while request := read_request(connection):
            if b"watch=1" not in request:
                listed = {"metadata": {"resourceVersion": "5"}, "items": [pod("one")]}
                connection.sendall(response(json.dumps(listed).encode()))
            elif number == 1:
                connection.sendall(CHUNKED)
                server.over.wait()
            else:
                added = json.dumps({"type": "ADDED", "object": pod("two", uid="2")}).encode() + b"\n"
                connection.sendall(CHUNKED + chunk(added))
                server.over.wait()

    with RawServer(silent) as server:
        watched = Watched(connected(server, tmp_path), idle_s=0.2)
        assert names(watched.until(lambda view: len(view.pods) == 2)) == {"one", "two"}
        assert watched.watch.failures >= 1
        watched.watch.stop()


class Behind:
    """A server whose first watch stays silent, and whose list has another pod by then."""

    def __init__(self) -> None:
        self.lists: list[bytes] = []
        self.pods = [pod("one", uid="1")]
        self.silent = threading.Event()
        self.over = threading.Event()

    def __call__(self, connection: socket.socket, number: int) -> None:
        while request := read_request(connection):
            if b"watch=1" in request:
                connection.sendall(CHUNKED)
                self.silent.set()
                self.over.wait()
                return
            self.lists.append(request)
            listed = {"metadata": {"resourceVersion": "5"}, "items": self.pods}
            connection.sendall(response(json.dumps(listed).encode()))


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[tuple[Behind, Watched, list[float]]]:
    script, now = Behind(), [1000.0]
    with RawServer(script) as server:
        watched = Watched(connected(server, tmp_path), idle_s=3600.0, clock=lambda: now[0])
        watched.until(lambda view: view.pods)
        assert script.silent.wait(30)
        yield script, watched, now
        script.over.set()
        watched.watch.stop()


def test_a_running_pod_that_a_silent_watch_lacks_is_listed_at_once(
    behind: tuple[Behind, Watched, list[float]],
) -> None:
    script, watched, now = behind
    script.pods = [pod("one", uid="1"), pod("hog", uid="2")]
    watched.watch.report_missing(frozenset({"2"}))
    now[0] += SPREAD_S
    watched.watch.report_missing(frozenset({"2"}))
    assert names(watched.until(lambda view: len(view.pods) == 2)) == {"one", "hog"}
    assert watched.watch.failures == 0
    assert b"resourceVersion=0" in script.lists[0]
    assert b"resourceVersion" not in script.lists[1], "the server's cache may be what is behind"


def test_an_orphan_that_no_list_contains_causes_fewer_and_fewer_lists(
    behind: tuple[Behind, Watched, list[float]],
) -> None:
    script, watched, now = behind
    for second in range(3600):
        now[0] += 1.0
        before = watched.watch.relists
        watched.watch.report_missing(frozenset({"orphan"}))
        if second % 60 == 0:
            threading.Event().wait(0.02)  # lets the thread run
        assert watched.watch.relists - before <= 1
    threading.Event().wait(0.1)
    # After 2, 4, 8 ... 300 s: no more than 8 + 3600 / 300.
    assert 3 <= len(script.lists) <= 21


def test_a_deleted_pod_causes_no_list_while_its_cgroup_stays(api: ApiServer, watched: Watched) -> None:
    uid = next(each.uid for each in watched.watch.view().pods if each.name == "one")
    api.delete_pod("default", "one")
    watched.until(lambda view: names(view) == {"two"})
    lists = watched.watch.relists
    for _ in range(200):
        watched.watch.report_missing(frozenset({uid}))
        threading.Event().wait(0.01)
    assert watched.watch.relists == lists


def test_running_pods_that_a_wrong_list_lacked_are_listed_again(
    behind: tuple[Behind, Watched, list[float]],
) -> None:
    script, watched, now = behind
    right, script.pods = script.pods, []
    watched.watch.report_missing(frozenset({"2"}))
    now[0] += SPREAD_S
    watched.watch.report_missing(frozenset({"2"}))
    watched.until(lambda view: not view.pods)
    script.pods = right
    lists = len(script.lists)
    watched.watch.report_missing(frozenset({"1"}))
    now[0] += DELETED_S
    for _ in range(2):
        watched.watch.report_missing(frozenset({"1"}))
        now[0] += SPREAD_S
    watched.watch.report_missing(frozenset({"1"}))
    watched.until(lambda view: view.pods)
    assert len(script.lists) == lists + 1


def test_running_pods_that_a_list_had_without_their_spec_are_listed_again(
    behind: tuple[Behind, Watched, list[float]],
) -> None:
    """The version of such a list is right, so no watch would ever send them again."""
    script, watched, now = behind
    right = script.pods
    script.pods = [{key: value for key, value in each.items() if key != "spec"} for each in right]
    watched.watch.report_missing(frozenset({"2"}))
    now[0] += SPREAD_S
    watched.watch.report_missing(frozenset({"2"}))
    watched.until(lambda view: view.notes and not view.pods)
    script.pods = right
    now[0] += DELETED_S
    for _ in range(2):
        watched.watch.report_missing(frozenset({"1"}))
        now[0] += SPREAD_S
    watched.watch.report_missing(frozenset({"1"}))
    assert names(watched.until(lambda view: view.pods)) == {"one"}


@pytest.mark.parametrize(("tokens", "most"), [(2, 3), (10**6, MAX_PAGES)], ids=["a circle", "no end"])
def test_an_endless_list_is_given_up(tokens: int, most: int, tmp_path: Path) -> None:
    requests: list[bytes] = []

    def endless(connection: socket.socket, number: int) -> None:
        while request := read_request(connection):
            requests.append(request)
            listed = {"metadata": {"resourceVersion": "5", "continue": f"t{len(requests) % tokens}"}, "items": []}
            connection.sendall(response(json.dumps(listed).encode()))

    with RawServer(endless) as server, pytest.raises(ApiError, match="the list cannot be read"):
        list_pods(connected(server, tmp_path), "lab-node")
    assert len(requests) == most


def scripted(watch_answer: Callable[[socket.socket], None]) -> Callable[[socket.socket, int], None]:
    """Lists one pod; each watch is answered by the function."""

    def drive(connection: socket.socket, number: int) -> None:
        while request := read_request(connection):
            if b"watch=1" in request:
                watch_answer(connection)
                return
            listed = {"metadata": {"resourceVersion": "5"}, "items": [pod("one")]}
            connection.sendall(response(json.dumps(listed).encode()))

    return drive


EXPIRED = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}\n'


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(CHUNKED + chunk(EXPIRED) + chunk(b""), id="a 410 storm"),
        pytest.param(CHUNKED + chunk(b"{garbage}\n"), id="garbage"),
        pytest.param(CHUNKED + chunk(b'{"type":"ADDED","object":{"meta'), id="a line that breaks off"),
        pytest.param(CHUNKED + chunk(b'{"type":"ADDED","object":7}\n') + chunk(b""), id="an event that is no object"),
        pytest.param(CHUNKED + chunk(b'{"type":"ERROR","object":[]}\n'), id="an empty error"),
        pytest.param(response(b"too many", status="429 Too Many Requests"), id="throttled"),
        pytest.param(b"", id="closed at once"),
        pytest.param(CHUNKED + chunk(b""), id="ended at once"),
    ],
)
def test_a_watch_that_always_fails_is_retried_less_and_less_often_and_the_pods_are_kept(
    tmp_path: Path, body: bytes
) -> None:
    watches = [0]
    enough = threading.Event()

    def answer(connection: socket.socket) -> None:
        watches[0] += 1
        if watches[0] >= 4:
            enough.set()
        connection.sendall(body)

    with RawServer(scripted(answer)) as server:
        watched = Watched(connected(server, tmp_path))
        assert enough.wait(30)
        view = watched.watch.view()
        assert len(view.pods) == 1
        before, began = watches[0], time.monotonic()
        threading.Event().wait(0.5)
        watched.watch.stop()
        # The back-off of these tests ends at 0.1 s, of which at least half is waited; one attempt may be under way. A
        # request whose connection is closed without an answer is sent once more, on a new one.
        attempts = (time.monotonic() - began) / 0.05 + 1
        assert watches[0] - before <= attempts * (1 if body else 2)


def test_a_stopped_watch_ends_its_thread_at_once(api: ApiServer, watched: Watched) -> None:
    before = [t for t in threading.enumerate() if t.name == "pods"]
    watched.watch.stop()
    assert len([t for t in before if t.is_alive()]) == len(before) - 1


def test_back_off_doubles_with_jitter_up_to_its_limit_and_obeys_the_server() -> None:
    backoff = RetryBackoff(first_s=1.0, last_s=8.0, rng=random.Random(0))
    waits = [backoff.failed() for _ in range(10)]
    for wait, delay in zip(waits, [1, 2, 4, 8, 8, 8, 8, 8, 8, 8], strict=True):
        assert delay / 2 <= wait <= delay
    assert backoff.failed(7.5) >= 7.5
    assert backoff.failed(1000.0) <= 8.0
    backoff.succeeded()
    assert backoff.failed() <= 1.0


def test_a_server_that_lets_every_watch_expire_is_not_listed_without_end(api: ApiServer, tmp_path: Path) -> None:
    def expire(request: Request, done: bool) -> None:
        if "watch" in request.query and not done:
            api.compact()

    api.at_request = expire
    watch = PodWatch(connected(api, tmp_path), "lab-node")
    watch.start()
    threading.Event().wait(5.0)
    watch.stop()
    assert 2 <= watch.relists <= 6, "after 0.25 s, 0.5 s, 1 s, 2 s at least"


def test_a_future_version_is_given_up_when_the_watch_stays_silent(api: ApiServer, tmp_path: Path) -> None:
    """As after a restored backup: the watch stays silent, and a new one from the same version as well."""
    before = api.store.version
    api.store.version += 1_000_000
    watch = PodWatch(connected(api, tmp_path), "lab-node", idle_s=0.5, backoff=RetryBackoff(first_s=0.05, last_s=0.1))
    watch.start()
    assert api.wait_for(lambda: api.watched("/api/v1/pods"))
    api.store.version = before
    api.add_pod(pod("new"))
    assert api.wait_for(lambda: watch.relists > 1)
    until(lambda: "new" in names(watch.view()), "the new pod", 20.0)
    watch.stop()
