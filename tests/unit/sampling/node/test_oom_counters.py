"""The counters of OOM kills, from trees as the kernel writes them and from hostile ones."""

from pathlib import Path

import pytest

from nodeagent.model import OomCount, OomEvents, OomLevel, OomPlace
from nodeagent.sampling.hostfs import cgroup_memory
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import oom_counters
from nodeagent.sampling.node.oom_counters import OomCgroups, OomKillCounter

UID, OTHER = "12345678-1234-1234-1234-123456789abc", "87654321-1234-1234-1234-123456789abc"
POD = f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID.replace('-', '_')}.slice"
CONTAINER = f"{POD}/cri-containerd-{'a' * 64}.scope"
SIBLING = f"{POD}/cri-containerd-{'b' * 64}.scope"
SERVICE = "/system.slice/database.service"
KUBEPODS = "/kubepods.slice"
HIERARCHY = Hierarchy("v2", "/sys/fs/cgroup", cgroup_memory.V2, "/sys/fs/cgroup", "/sys/fs/cgroup")
HIERARCHY_V1 = Hierarchy("v1", "/sys/fs/cgroup/memory", cgroup_memory.V1, None, None)


class Tree:
    """A cgroup v2 tree whose counters go up as the kernel's do: in the cgroup itself and in all above it."""

    def __init__(self, root: Path, *, local: bool = True) -> None:
        self.root = root
        self.local = local
        self.counts: dict[str, list[int]] = {}
        self.own: dict[str, list[int]] = {}
        self.cgroups = OomCgroups(Host(str(root)))
        for path in (CONTAINER, SIBLING, SERVICE, "/init.scope"):
            self.make(path)

    def make(self, path: str) -> None:
        parts = path.strip("/").split("/")
        for number in range(1, len(parts) + 1):
            here = "/" + "/".join(parts[:number])
            self.counts.setdefault(here, [0, 0, 0])
            self.own.setdefault(here, [0, 0, 0])
            self.write(here)

    def write(self, path: str) -> None:
        directory = self.root / "sys/fs/cgroup" / path[1:]
        directory.mkdir(parents=True, exist_ok=True)
        names = ("oom", "oom_kill", "oom_group_kill")
        for file, table in (("memory.events", self.counts), ("memory.events.local", self.own)):
            if file == "memory.events" or self.local:
                lines = [f"{name} {number}\n" for name, number in zip(names, table[path], strict=True)]
                (directory / file).write_text("low 0\nhigh 0\nmax 12\n" + "".join(lines))

    def add(self, path: str, *, ooms: int = 0, kills: int = 0, group_kills: int = 0) -> None:
        parts = path.strip("/").split("/")
        for number in range(1, len(parts) + 1):
            here = "/" + "/".join(parts[:number])
            for table in (self.counts, self.own):
                if table is self.counts or here == path:
                    for position, more in enumerate((ooms, kills, group_kills)):
                        table[here][position] += more
            self.write(here)

    def remove(self, path: str) -> None:
        directory = self.root / "sys/fs/cgroup" / path[1:]
        for child in sorted(directory.rglob("*"), reverse=True):
            child.rmdir() if child.is_dir() else child.unlink()
        directory.rmdir()
        for table in (self.counts, self.own):
            for known in [each for each in table if each == path or each.startswith(f"{path}/")]:
                del table[known]

    def read(self) -> dict[str, OomCount]:
        return {count.place.path: count for count in self.cgroups.read(HIERARCHY, KUBEPODS)}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_nothing_happened_is_no_count(tree: Tree) -> None:
    assert tree.read() == {}


def test_a_kill_is_counted_once_and_in_its_cgroup_alone(tree: Tree) -> None:
    tree.add(CONTAINER, ooms=1, kills=2)
    assert tree.read() == {
        CONTAINER: OomCount(OomPlace(CONTAINER, OomLevel.CONTAINER, UID, "a" * 64), OomEvents(1, 2, 0))
    }
    assert tree.read() == {}
    tree.add(CONTAINER, kills=1)
    assert tree.read()[CONTAINER].own == OomEvents(0, 1, 0)


def test_a_limit_of_the_pod_is_told_from_that_of_its_container(tree: Tree) -> None:
    tree.add(POD, ooms=1)
    tree.add(CONTAINER, kills=1)
    found = tree.read()
    assert found[POD].own == OomEvents(1, 0, 0)
    assert found[CONTAINER].own == OomEvents(0, 1, 0)


def test_a_container_that_is_gone_is_counted_in_its_pod(tree: Tree) -> None:
    tree.add(CONTAINER, ooms=1, kills=1, group_kills=1)
    tree.remove(CONTAINER)
    [count] = tree.read().values()
    assert count.place == OomPlace(POD, OomLevel.POD, UID)
    assert (count.own, count.gone) == (OomEvents(), OomEvents(1, 1, 1))
    assert count.present == {"b" * 64}


def test_a_container_that_goes_after_it_was_listed_is_not_present(tree: Tree) -> None:
    tree.add(CONTAINER, ooms=1, kills=1)
    (tree.root / "sys/fs/cgroup" / CONTAINER[1:] / "memory.events").unlink()
    [count] = tree.read().values()
    assert (count.place.path, count.gone) == (POD, OomEvents(1, 1, 0))
    assert count.present == {"b" * 64}


def test_a_pod_that_is_gone_is_counted_in_its_qos_class(tree: Tree) -> None:
    tree.add(CONTAINER, kills=3)
    tree.remove(POD)
    [count] = tree.read().values()
    assert count.place == OomPlace("/kubepods.slice/kubepods-besteffort.slice", OomLevel.KUBEPODS)
    assert count.gone == OomEvents(0, 3, 0)


def test_a_service_is_counted_by_its_path(tree: Tree) -> None:
    tree.add(SERVICE, ooms=1, kills=1)
    [count] = tree.read().values()
    assert count == OomCount(OomPlace(SERVICE, OomLevel.HOST), OomEvents(1, 1, 0))


def test_a_cgroup_that_was_made_again_begins_with_zero(tree: Tree) -> None:
    tree.add(CONTAINER, kills=5)
    tree.read()
    tree.remove(CONTAINER)
    tree.make(CONTAINER)
    tree.add(CONTAINER, kills=1)
    assert {path: count.own.kills + count.gone.kills for path, count in tree.read().items()} == {CONTAINER: 1}


def test_what_an_earlier_process_saw_is_not_new(tree: Tree) -> None:
    tree.add(CONTAINER, kills=2)
    tree.read()
    tree.cgroups = OomCgroups(Host(str(tree.root)), tree.cgroups.totals)
    assert tree.read() == {}
    tree.add(CONTAINER, kills=1)
    assert tree.read()[CONTAINER].own.kills == 1


@pytest.mark.parametrize("content", ["", "oom_kill\n", "oom_kill -1\n", "oom_kill 9999999999999999999999\n", "\0\xff"])
def test_a_malformed_file_is_no_kill(tree: Tree, content: str) -> None:
    for directory in ("kubepods.slice", "system.slice", "system.slice/database.service"):
        (tree.root / "sys/fs/cgroup" / directory / "memory.events").write_text(content)
    assert tree.read() == {}


def test_before_linux_5_2_the_kills_of_a_pod_are_those_of_its_containers(tmp_path: Path) -> None:
    tree = Tree(tmp_path, local=False)
    tree.add(POD, ooms=1)
    tree.add(CONTAINER, kills=1)
    tree.add(SERVICE, kills=1)
    found = tree.read()
    assert found[POD].own == OomEvents(1, 0, 0)
    assert found[CONTAINER].own.kills == found[SERVICE].own.kills == 1


def test_cgroups_of_version_1_count_their_own_kills_and_no_causes(tmp_path: Path) -> None:
    pod = f"/kubepods/burstable/pod{UID}"
    inner = f"{pod}/{'a' * 64}/init.scope"
    for path, number in {pod: 0, f"{pod}/{'a' * 64}": 1, inner: 2, "/system.slice/x.service": 1}.items():
        directory = tmp_path / "sys/fs/cgroup/memory" / path[1:]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {number}\n")
    reader = OomCgroups(Host(str(tmp_path)))
    found = {count.place.path: count for count in reader.read(HIERARCHY_V1, "/kubepods")}
    assert {path: count.own.kills for path, count in found.items()} == {
        f"{pod}/{'a' * 64}": 3,
        "/system.slice/x.service": 1,
    }
    assert not any(count.causes_known for count in found.values())
    assert reader.read(HIERARCHY_V1, "/kubepods") == ()


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("", OomPlace("/", OomLevel.HOST)),
        ("/", OomPlace("/", OomLevel.HOST)),
        ("/kubepods.slicer/x", OomPlace("/kubepods.slicer/x", OomLevel.HOST)),
        (KUBEPODS, OomPlace(KUBEPODS, OomLevel.KUBEPODS)),
        (POD, OomPlace(POD, OomLevel.POD, UID)),
        (f"{POD}/x", OomPlace(POD, OomLevel.POD, UID)),
        (CONTAINER, OomPlace(CONTAINER, OomLevel.CONTAINER, UID, "a" * 64)),
        (f"{CONTAINER}/kubepods/pod{OTHER}", OomPlace(CONTAINER, OomLevel.CONTAINER, UID, "a" * 64)),
        (f"{KUBEPODS}/system/pod{UID}", OomPlace(f"{KUBEPODS}/system/pod{UID}", OomLevel.POD, UID)),
    ],
)
def test_a_place_is_what_its_path_says_and_no_container_can_name_another_pod(path: str, place: OomPlace) -> None:
    assert oom_counters.place_of(path, KUBEPODS) == place


def test_without_kubepods_every_cgroup_is_the_hosts() -> None:
    assert oom_counters.place_of(POD, "").level is OomLevel.HOST


def test_the_nodes_counter_is_read_from_a_file_of_several_pages(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("".join(f"filler_{n} 0\n" for n in range(900)) + "oom_kill 17\nlast 1\n")
    assert OomKillCounter(Host(str(tmp_path))).read() == 17


@pytest.mark.parametrize("content", ["", "nr_free_pages 1\n", "x 1\noom_kill -3\n", "x 1\noom_kill z\ny 1\n"])
def test_a_node_that_does_not_count_kills_has_an_unknown_number(tmp_path: Path, content: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text(content)
    assert OomKillCounter(Host(str(tmp_path))).read() is None


def test_the_counter_of_this_machine_is_known() -> None:
    counter = OomKillCounter(Host("/"))
    first = counter.read()
    assert first is not None
    assert (counter.read() or 0) >= first
    counter.close()
