"""The watch of own limits: whose are read, when next, and what history the policy gets."""

import shutil
from pathlib import Path
from typing import Any, Final

import pytest

from nodeagent.config.own_limit import OwnLimitConfig
from nodeagent.config.schema import ProtectionConfig, SamplingConfig
from nodeagent.loop.own_limit_watch import SHORTEST_S, STEADY_S, OwnLimitWatch, WatchResult
from nodeagent.model import Pod, PodSource, PodView
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from tests.support.nodes import config
from tests.support.trees import MI, Node, TreeContainer, TreePod, container_id, pod_cgroup, write_node

LIMIT: Final = 512 * MI
ON: Final = config(
    own_limit=OwnLimitConfig(enabled=True, namespaces=("shop",)), protection=ProtectionConfig(minimum_age_s=0.0)
)
TREE: Final = TreePod("shop/web")


class Watched:
    """One pod in a tree, read again and again."""

    def __init__(self, directory: Path, settings: Any = ON) -> None:
        self.directory, self.settings = directory, settings
        self.grow(50)
        self.sampler = Sampler(open_host(str(directory)), SamplingConfig(), node_name="n")
        self.watch = OwnLimitWatch()
        self.sampler.sample_node()
        self.retarget()

    def retarget(self) -> None:
        pods = self.sampler.sample([api_pod()]).pods
        self.watch.set_targets(pods, self.settings)

    def grow(self, mib: int, limit: int = LIMIT, container: str = "c", cache: int = 0) -> None:
        tree = TREE._replace(working_set=mib * MI, containers=(TreeContainer(container),))
        node = Node(pods=(tree,))
        write_node(self.directory, node)
        scope = f"cri-containerd-{container_id(tree, TreeContainer(container))}.scope"
        directory = self.directory / f"sys/fs/cgroup{pod_cgroup(node, tree)}/{scope}"
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{(mib + cache) * MI}\n")
        stat = {"anon": mib, "inactive_file": cache, "active_file": 0, "file": cache}
        (directory / "memory.stat").write_text("".join(f"{key} {size * MI}\n" for key, size in stat.items()))
        (directory / "memory.events").write_text("high 0\nmax 0\n")

    def read(self, at: float) -> WatchResult:
        return self.watch.read(self.sampler, now=at, config=self.settings)


def api_pod() -> Pod:
    namespace, name = TREE.key.split("/")
    return Pod(TREE.cgroup_uid, TREE.cgroup_uid, namespace, name, PodSource.API, TREE.qos)


def test_nothing_is_read_of_a_pod_that_did_not_opt_in(tmp_path: Path) -> None:
    watched = Watched(tmp_path, config())
    watched.grow(510)
    assert watched.read(1.0) == WatchResult()
    assert watched.watch.limits == {}
    other = config(own_limit=OwnLimitConfig(enabled=True, namespaces=("other",)))
    watched.settings = other
    watched.retarget()
    assert watched.read(1.0) == WatchResult()


def test_a_ramp_is_read_more_and_more_often_and_found_near_from_the_share_on(tmp_path: Path) -> None:
    """At 50 MiB/s, at the times that the watch asks for itself."""
    watched, at, found = Watched(tmp_path), 0.0, WatchResult()
    pauses = []
    while not found.near:
        watched.grow(50 + round(50 * at))
        found = watched.read(at)
        pauses.append(found.next_s)
        at += min(1.0, found.next_s)
        assert at < 12
    used = 50 + 50 * (at - min(1.0, found.next_s))
    assert 0.7 * 512 <= used <= 0.75 * 512, "three seconds are left"
    assert pauses[0] > 1.0
    assert min(pauses) == SHORTEST_S
    assert found.near == {TREE.cgroup_uid}


def test_a_ramp_that_page_cache_hides_is_found_in_time_as_well(tmp_path: Path) -> None:
    """The usage stays at the limit from the start: 20 MiB/s of heap take the place of page cache."""
    watched, at, found = Watched(tmp_path), 0.0, WatchResult()
    while not found.near:
        mib = 350 + round(max(0.0, 20 * (at - 5.0)))
        watched.grow(mib, cache=510 - mib)
        found = watched.read(at)
        at += min(1.0, found.next_s)
        assert at < 8.0, "the kernel kills it after 13"


def test_a_pod_that_does_not_grow_is_not_read_at_50_hertz(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.grow(350)
    assert [watched.read(float(at)).next_s for at in range(8)][-1] == STEADY_S
    watched.grow(450)
    assert [watched.read(float(at)).next_s for at in range(8, 30)][-1] == float("inf"), "with the node's samples"


def test_what_left_the_history_is_the_peak(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    for at, mib in enumerate([300, 490, 300, 310, 320, 330, 340, 350, 360]):
        watched.grow(mib)
        watched.read(float(at))
    [own] = watched.watch.limits[TREE.cgroup_uid]
    assert (own.peak, len(own.history)) == (490 * MI, 6)


@pytest.mark.parametrize("change", [{"container": "d"}, {"limit": 600 * MI}])
def test_a_restart_and_a_resize_begin_a_new_history(tmp_path: Path, change: dict[str, Any]) -> None:
    watched = Watched(tmp_path)
    for at in range(8):
        watched.grow(300 + at)
        watched.read(float(at))
    for directory in (tmp_path / "sys/fs/cgroup").rglob("cri-containerd-*.scope"):
        shutil.rmtree(directory)
    watched.grow(300, **change)
    watched.retarget()
    watched.read(14.0)
    [own] = watched.watch.limits[TREE.cgroup_uid]
    assert (own.peak, len(own.history)) == (0, 1)


def test_reclaims_count_while_they_are_in_the_history(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    lately = []
    for at in range(12):
        watched.grow(400 + at)
        if at >= 2:
            [events] = (tmp_path / "sys/fs/cgroup").rglob("memory.events")
            events.write_text("high 2\nmax 3\n")
        watched.read(float(at))
        [own] = watched.watch.limits[TREE.cgroup_uid]
        lately.append(own.reclaimed_lately)
    assert lately == [False] * 2 + [True] * 6 + [False] * 4, "what was counted before the watch began is no news"


def test_a_terminating_pod_is_not_watched(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    views = [PodView(pod._replace(deletion_wall=5.0), usage) for pod, usage in watched.sampler.sample([api_pod()]).pods]
    watched.watch.set_targets(views, ON)
    assert watched.read(1.0) == WatchResult()
