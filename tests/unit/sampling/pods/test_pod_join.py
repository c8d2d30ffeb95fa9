"""Which pod a cgroup belongs to: its UID decides, and a mirror pod's claim only if the host confirms it."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import ProtectionConfig, SamplingConfig
from nodeagent.kube.pod_decoder import decode_pod
from nodeagent.model import Container, NodeSnapshot, Pod, PodSource, PodUsage, PodView, QOSClass
from nodeagent.policy import protection
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.pods import pod_join
from nodeagent.sampling.pods.pod_names import PodName
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import MI, Node, TreeContainer, TreePod, container_id, write_node

Json = dict[str, Any]
HASH = "40752f5e63399d9c92ea85f4b6e74059"
"""Of the static pod in the recorded nodes."""
CHOSEN = "00000000-1111-4222-8333-444444444444"
"""A UID that a manifest gives its static pod in metadata.uid."""
HOG, QUIET = "18479ae7-2c3a-408e-8632-93b5dfb8cf90", "d42eb8e8-fbc3-4112-9e57-8573982e8952"
NODE = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-uid", "controller": True}
REPLICA_SET = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-uid", "controller": True}


def api_pod(key: str, uid: str, annotations: dict[str, str] | None = None, owner: Json = REPLICA_SET) -> Pod:
    namespace, name = key.split("/")
    marks = {f"kubernetes.io/config.{word}": value for word, value in (annotations or {}).items()}
    metadata = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": "7", "annotations": marks}
    entry = {
        "metadata": {**metadata, "ownerReferences": [owner]},
        "spec": {"containers": [], "nodeName": "n1", "priority": 0},
        "status": {"phase": "Running", "qosClass": "BestEffort"},
    }
    return decode_pod(json.dumps(entry).encode())


def mirror(key: str, of: str, *, uid: str = "9b2ff3a0-6d5c-4bb0-b7a4-5f6dd5d1a001") -> Pod:
    """As a kubelet creates it, and as a tenant that knows the Node's UID may forge it."""
    return api_pod(key, uid, {"mirror": of, "hash": of, "source": "file"}, NODE)


def usage(uid: str) -> PodUsage:
    return PodUsage(uid, QOSClass.BEST_EFFORT, f"/kubepods/besteffort/pod{uid}", 100.0, memory_working_set=MI)


def joined(pods: Sequence[Pod], cgroups: Sequence[str], names: dict[str, PodName] | None = None) -> tuple[PodView, ...]:
    known = names or {}
    confirmed = pod_join.confirm_mirrors(pods, uids=frozenset(cgroups), names=known)
    return pod_join.join_pods([usage(uid) for uid in cgroups], confirmed, names=known, wall_offset=0.0).views


def holder(views: Sequence[PodView], cgroup: str) -> Pod:
    [pod] = [view.pod for view in views if view.usage is not None and view.usage.cgroup_uid == cgroup]
    return pod


def codes(pod: Pod) -> set[str]:
    return {
        refusal.code for refusal in protection.object_refusals(pod, ProtectionConfig(unknown_pods=False, namespaces=()))
    }


@pytest.mark.parametrize(("uid", "named"), [(HASH, True), (HASH, False), (CHOSEN, True)])
def test_a_mirror_pod_has_the_cgroup_of_its_static_pod(uid: str, named: bool) -> None:
    names = {uid: PodName("kube-system", "etcd-n1")} if named else None
    views = joined([mirror("kube-system/etcd-n1", uid), api_pod("a/web", QUIET)], [uid, QUIET], names)
    assert len(views) == 2
    assert (holder(views, uid).key, codes(holder(views, uid))) == ("kube-system/etcd-n1", {"mirror-pod"})


def test_without_log_directories_no_mirror_pod_takes_the_cgroup_of_an_unlisted_pod() -> None:
    """The watch is silent, a large pod is new, and its author creates an object that claims to mirror it."""
    views = joined([mirror("evil/thief", HOG)], [HOG])
    assert holder(views, HOG).source is PodSource.HOST
    assert [view.usage for view in views if view.pod.name == "thief"] == [None]


def test_a_static_pod_without_a_mirror_pod_is_recognized_by_its_config_hash() -> None:
    """As on the recorded calm node, whose static pod had no mirror pod in the API for a while."""
    [view] = joined([], [HASH], {HASH: PodName("kube-system", "etcd-n1")})
    assert (view.pod.source, codes(view.pod)) == (PodSource.HOST, {"static-pod"})
    [view] = joined([], [HOG], {HOG: PodName("a", "hog")})
    assert codes(view.pod) == set(), "only unknownPods protects it"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_real_uid_wins_over_a_claim(order: tuple[int, ...]) -> None:
    pods = [mirror("evil/thief", HOG), api_pod("evil/hog", HOG), api_pod("a/web", QUIET)]
    views = joined([pods[place] for place in order], [HOG, QUIET])
    assert (holder(views, HOG).key, holder(views, QUIET).key) == ("evil/hog", "a/web")
    assert [view.usage for view in views if view.pod.name == "thief"] == [None]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("uid", [HASH, CHOSEN])
def test_of_two_claims_on_one_cgroup_the_one_with_the_name_of_its_log_directory_is_confirmed(
    order: tuple[int, int], uid: str
) -> None:
    pods = [mirror("kube-system/etcd-n1", uid), mirror("evil/thief", uid, uid="1b2ff3a0-6d5c-4bb0-b7a4-5f6dd5d1a002")]
    ordered = [pods[place] for place in order]
    views = joined(ordered, [uid], {uid: PodName("kube-system", "etcd-n1")})
    assert holder(views, uid).key == "kube-system/etcd-n1"
    # Without log directories neither is confirmed, and the cgroup belongs to a pod that only the host knows.
    views = joined(ordered, [uid])
    assert holder(views, uid).source is PodSource.HOST
    assert [view.usage for view in views if view.pod.source is PodSource.API] == [None, None]


def test_a_claim_on_a_pod_that_the_api_server_does_not_list_needs_its_name() -> None:
    views = joined([mirror("evil/thief", HOG)], [HOG], {HOG: PodName("evil", "hog")})
    assert holder(views, HOG).source is PodSource.HOST
    # It is not confirmed before there is such a directory either: the cgroup of the pod may be new.
    views = joined([mirror("evil/thief", HOG)], [HOG], {QUIET: PodName("a", "web")})
    assert holder(views, HOG).source is PodSource.HOST


def test_a_pod_with_a_cgroup_of_its_own_is_no_mirror_pod() -> None:
    forged = mirror("evil/hog", HASH, uid=HOG)
    views = joined([forged], [HOG, HASH])
    assert (holder(views, HOG).key, codes(holder(views, HOG))) == ("evil/hog", set())
    assert holder(views, HASH).source is PodSource.HOST


def test_the_same_pods_are_confirmed_once_and_changed_ones_keep_the_objects_of_the_others() -> None:
    mirrors, uids = pod_join.MirrorPods(), frozenset({HASH, QUIET})
    names = {HASH: PodName("kube-system", "etcd-n1")}
    etcd, web = mirror("kube-system/etcd-n1", HASH), api_pod("a/web", QUIET)
    first = mirrors.confirm((etcd, web), uids=uids, names=names)
    pods = (etcd, web._replace(priority=7))
    again = mirrors.confirm(pods, uids=uids, names=names)
    assert mirrors.confirm(pods, uids=uids, names=names) is again
    assert again[0] is first[0]
    assert (again[0].cgroup_uid, again[1]) == (HASH, pods[1])
    # A later reading of the host may contradict.
    assert mirrors.confirm(pods, uids=uids | {etcd.uid}, names=names)[0].mirror_of == ""
    ordinary = (web,)
    assert mirrors.confirm(ordinary, uids=uids, names=names) is ordinary


MARKS = st.dictionaries(
    st.sampled_from(["mirror", "hash", "source", "seen"]),
    st.sampled_from([HASH, CHOSEN, HOG, QUIET, "file", "http", "api", ""]),
)
OWNERS = st.sampled_from([REPLICA_SET, NODE, NODE | {"name": "n2"}, NODE | {"apiVersion": "example.com/v1"}])


@settings(max_examples=300)
@given(st.data())
def test_no_annotation_takes_a_cgroup_away_or_protects_a_pod(data: st.DataObject) -> None:
    """Whatever tenants forge, in their own pods and in any number of further pods, in any order."""
    names = {HASH: PodName("kube-system", "etcd-n1"), HOG: PodName("evil", "hog")}
    if not data.draw(st.booleans(), "log directories"):
        names = {}
    real = {uid: api_pod(key, uid) for key, uid in (("evil/hog", HOG), ("a/web", QUIET))}
    forged = {uid: api_pod(pod.key, uid, data.draw(MARKS), data.draw(OWNERS)) for uid, pod in real.items()}
    further = [
        api_pod(f"evil/extra-{number}", f"3b2ff3a0-6d5c-4bb0-b7a4-5f6dd5d1a00{number}", data.draw(MARKS), owner)
        for number, owner in enumerate(data.draw(st.lists(OWNERS, max_size=3)))
    ]
    pods = [*forged.values(), *further, mirror("kube-system/etcd-n1", HASH)]
    views = joined(data.draw(st.permutations(pods)), data.draw(st.permutations([HOG, QUIET, HASH])), names)
    for uid, pod in real.items():
        assert holder(views, uid).key == pod.key
        assert codes(holder(views, uid)) == codes(pod) == set()
    static = holder(views, HASH)
    assert codes(static) & {"static-pod", "mirror-pod"}
    assert static.name == "etcd-n1" or (not names and static.source is PodSource.HOST)
    assert sum(view.usage is not None for view in views) == 3


def test_a_sample_and_the_recheck_reject_forged_claims(tmp_path: Path) -> None:
    etcd, hog = TreePod("kube-system/etcd-n1", uid=HASH), TreePod("evil/hog", uid=HOG, working_set=500 * MI)
    root = write_node(tmp_path, Node(pods=(etcd, hog)))
    # Sorted first, the hog's own object forged too: it claims the cgroup of the static pod.
    pods = (
        mirror("evil/a-thief", HOG, uid="1b2ff3a0-6d5c-4bb0-b7a4-5f6dd5d1a002"),
        mirror("evil/hog", HASH, uid=HOG),
        mirror("kube-system/etcd-n1", HASH),
    )
    with Sampler(open_host(root), SamplingConfig(), node_name="n1") as sampler:
        snapshot = sampler.sample(pods, 1.0)
        newer = (*pods[:1], pods[1]._replace(ready=True), *pods[2:])
        uids = frozenset(pod.uid for pod in pods)
        again = sampler.read_again(snapshot.pods, newer, pod_uids=uids)
    for views in (snapshot.pods, again.pods):
        assert {view.pod.key: codes(view.pod) for view in views if view.usage is not None} == {
            "evil/hog": set(),
            "kube-system/etcd-n1": {"mirror-pod"},
        }
        assert holder(views, HOG).name == "hog"


def _sample(root: str) -> NodeSnapshot:
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def _usage(view: PodView) -> PodUsage:
    assert view.usage is not None
    return view.usage


def _api_pod(tree: TreePod, uid: str = "") -> Pod:
    namespace, name = tree.key.split("/")
    return Pod(uid or tree.cgroup_uid, tree.cgroup_uid, namespace, name, PodSource.API, tree.qos)


def test_a_mirror_pod_has_the_usage_of_the_cgroup_with_its_config_hash(tmp_path: Path) -> None:
    static = TreePod("kube-system/etcd-n", uid=HASH)
    usages = [_usage(view) for view in _sample(write_node(tmp_path, Node(pods=(static,)))).pods]
    views = pod_join.join_pods(usages, [_api_pod(static, uid="mirror-uid")], names={}, wall_offset=0.0).views
    assert [(view.pod.uid, view.usage) for view in views] == [("mirror-uid", usages[0])]


def test_every_pod_of_either_side_is_listed_once(tmp_path: Path) -> None:
    both, unknown, starting = TreePod("a/both"), TreePod("a/unknown"), TreePod("a/starting")
    root = write_node(tmp_path, Node(pods=(both, unknown)))
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        snapshot = sampler.sample([_api_pod(both), _api_pod(starting)], pods_synced_at=99_999.0)
    sources = {view.pod.name: (view.pod.source, view.usage is not None) for view in snapshot.pods}
    assert sources == {
        "both": (PodSource.API, True),
        "starting": (PodSource.API, False),
        "unknown": (PodSource.HOST, True),
    }
    assert snapshot.pods_synced_at == 99_999.0


def test_without_the_api_server_every_pod_comes_from_the_host(tmp_path: Path) -> None:
    snapshot = _sample(write_node(tmp_path, Node(pods=(TreePod("a/b"),))))
    assert [view.pod.source for view in snapshot.pods] == [PodSource.HOST]
    assert snapshot.pods_synced_at is None


def test_the_api_server_names_containers_without_log_links(tmp_path: Path) -> None:
    pod = TreePod("a/b", logs=False)
    usages = [_usage(view) for view in _sample(write_node(tmp_path, Node(pods=(pod,)))).pods]
    known = Container("web", container_id=container_id(pod, TreeContainer()))
    views = pod_join.join_pods(usages, [_api_pod(pod)._replace(containers=(known,))], names={}, wall_offset=0.0).views
    assert [container.name for container in _usage(views[0]).containers] == ["web"]
