"""docs/kubelet-differences.md is complete, and the decisions that it describes are made that way."""

import ast
import random
import re

import pytest

from nodeagent.config.load import load
from nodeagent.config.schema import Config, RankingConfig
from nodeagent.model import (
    Container,
    ContainerUsage,
    DiskLayout,
    DiskUsage,
    Owner,
    PodView,
    ReclaimOutcome,
    ReclaimResult,
    Resources,
    Signal,
)
from nodeagent.policy.engine import decide
from nodeagent.policy.outcomes import apply_reclaim
from nodeagent.policy.state import initial
from tests.support.config_files import problems
from tests.support.nodes import GI, MI, NOW, config, hard, not_started, pod, snapshot, soft, usage, view
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "kubelet-differences.md").read_text()
ROWS = re.findall(r"^\| ([QBKO]\d+) \|(.*)\|$", PAGE, flags=re.MULTILINE)
KUBELET = RankingConfig(kubelet=True)

QUIRKS = {
    "Q1": "child cgroups",
    "Q2": "100.0%",
    "Q3": "containerfs",
    "Q4": "random order",
    "Q5": "notifier",
    "Q6": "cleanup",
    "Q7": "inodes",
    "Q8": "without stats",
    "Q9": "split",
    "Q10": "negative maximum",
    "Q11": "caps the whole pod",
    "Q12": "foreign reason and message",
    "Q13": "resources: {}",
    "Q14": "requests of containers",
    "Q15": "overwrites",
}
"""Every real but probably unintended behaviour of the kubelet, by a word of its row."""


def test_every_quirk_of_the_kubelet_has_its_row() -> None:
    described = {name: row.split("|")[0] for name, row in ROWS if name.startswith("Q")}
    assert list(described) == list(QUIRKS)
    for name, word in QUIRKS.items():
        assert word in described[name]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[name for name, _ in ROWS])
def test_every_row_has_a_difference_a_reason_and_an_existing_test(name: str, row: str) -> None:
    cells = [cell.strip() for cell in row.split("|")]
    assert len(cells) == 4
    assert all(cells)
    named = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", cells[3])
    assert named is not None
    tree = ast.parse((REPOSITORY / named[1]).read_text())
    assert named[2] in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


# --- decisions --------------------------------------------------------------------------------------------------------


def victims(made: Config, *pods: object, **of: object) -> list[str]:
    """Names of the pods that the first decision on such a node evicts."""
    plan, _ = decide(snapshot(*pods, **of), initial("t", now=NOW), now=NOW, config=made)  # type: ignore[arg-type]
    return [str(victim.pod.name) for victim in plan.victims]


def order(made: Config, *pods: object, **of: object) -> list[str]:
    """Names in eviction order."""
    plan, _ = decide(snapshot(*pods, **of), initial("t", now=NOW), now=NOW, config=made)  # type: ignore[arg-type]
    return [str(each.view.pod.name) for each in plan.ranking]


def test_resources_are_decided_in_the_same_order_every_time() -> None:
    left: list[Signal] = [Signal.PID, Signal.NODEFS_INODES, Signal.NODEFS, Signal.MEMORY]
    starved: dict[Signal, int | None] = dict.fromkeys(left, 10)
    hog = view("hog", 500 * MI, usage_more={"disk": DiskUsage(MI, 50, MI, 50, MI, 50)})

    def served(thresholds: list[Signal]) -> Signal:
        made = config(*(hard(signal, 1000) for signal in thresholds), ranking=KUBELET)
        plan, _ = decide(snapshot(hog, available=starved), initial("t", now=NOW), now=NOW, config=made)
        assert plan.acting_on is not None
        return plan.acting_on.threshold.signal

    shuffled = random.Random(7)
    for wanted in (Signal.MEMORY, Signal.NODEFS, Signal.NODEFS_INODES, Signal.PID):
        for _ in range(5):
            shuffled.shuffle(left)
            assert served(left) is wanted
        left.remove(wanted)


def test_two_decisions_on_one_sample_evict_once() -> None:
    made = config(hard(Signal.MEMORY, 1000), ranking=KUBELET)
    shot = snapshot(view("a", 500), view("b", 400), available={Signal.MEMORY: 10})
    first, state = decide(shot, initial("t", now=NOW), now=NOW, config=made)
    second, _ = decide(shot, state, now=NOW + 0.001, config=made)
    assert [victim.pod.name for victim in first.victims] == ["a"]
    assert second.victims == ()


def test_a_soft_threshold_that_is_not_due_evicts_no_pod_when_another_resource_has_recovered() -> None:
    made = config(hard(Signal.NODEFS, 1000), soft(Signal.PID, 1000, grace_s=600.0), ranking=KUBELET)
    hog = view("hog", MI, usage_more={"disk": DiskUsage(MI, 5, MI, 5, MI, 5)})
    full = {Signal.NODEFS: 10, Signal.PID: 10}
    assert victims(made, hog, available=full) == ["hog"]
    assert victims(made, hog, available=full | {Signal.NODEFS: 1000}) == []


def test_only_the_most_urgent_resource_is_decided_even_without_candidates() -> None:
    """No difference: the kubelet also ends its sync there. The default order continues with the next resource."""
    hog = view("hog", None, usage_more={"disk": DiskUsage(MI, 5, MI, 5, MI, 5)})
    starved = {Signal.MEMORY: 10, Signal.NODEFS: 10}
    thresholds = (hard(Signal.MEMORY, 1000), hard(Signal.NODEFS, 1000))
    assert victims(config(*thresholds, ranking=KUBELET), hog, available=starved) == []
    assert victims(config(*thresholds), hog, available=starved) == ["hog"]


@pytest.mark.parametrize("signal", [Signal.MEMORY, Signal.PID, Signal.NODEFS, Signal.NODEFS_INODES])
def test_the_next_pod_is_evicted_with_the_sample_in_which_the_last_victim_is_gone(signal: Signal) -> None:
    """No difference: the kubelet waits for its victim, then decides at once. The default order waits for one sample
    more, and for the files."""
    disk_usage = {"disk": DiskUsage(5000, 5000, 0, 0, 0, 0), "process_count": 5000, "thread_count": 5000}
    a, b = view("a", 5000, usage_more=disk_usage, priority=-1), view("b", 4000, usage_more=disk_usage)
    for kubelet, expected in ((True, ["b"]), (False, [])):
        made = config(hard(signal, 1000), ranking=RankingConfig(kubelet=kubelet))
        plan, state = decide(snapshot(a, b, available={signal: 10}), initial("t", now=NOW), now=NOW, config=made)
        assert [victim.pod.name for victim in plan.victims] == ["a"]
        second = snapshot(b, at=NOW + 10, available={signal: 10})
        assert [victim.pod.name for victim in decide(second, state, now=NOW + 10, config=made)[0].victims] == expected


def test_the_files_of_a_pod_whose_object_still_exists_are_waited_for_as_long_as_by_the_kubelet() -> None:
    """A kubelet removes the object last: while it exists, the files may exist too."""
    disk_usage = {"disk": DiskUsage(5000, 5, 0, 0, 0, 0)}
    a, b = view("a", usage_more=disk_usage, priority=-1), view("b", usage_more=disk_usage)
    made = config(hard(Signal.NODEFS, 1000), ranking=KUBELET)
    plan, state = decide(snapshot(a, b, available={Signal.NODEFS: 10}), initial("t", now=NOW), now=NOW, config=made)
    assert [victim.pod.name for victim in plan.victims] == ["a"]
    stopped = PodView(not_started(a.pod), None)
    for later_s, expected in ((2, []), (20, []), (33, ["b"])):
        node = snapshot(stopped, b, at=NOW + later_s, available={Signal.NODEFS: 10})
        plan, state = decide(node, state, now=NOW + later_s, config=made)
        assert [victim.pod.name for victim in plan.victims] == expected
    plan, state = decide(snapshot(a, b, available={Signal.NODEFS: 10}), initial("t", now=NOW), now=NOW, config=made)
    for later_s, pods, expected in ((2, (stopped, b), []), (4, (b,), ["b"])):
        node = snapshot(*pods, at=NOW + later_s, available={Signal.NODEFS: 10})
        plan, state = decide(node, state, now=NOW + later_s, config=made)
        assert [victim.pod.name for victim in plan.victims] == expected


@pytest.mark.parametrize("signal", [Signal.MEMORY, Signal.PID, Signal.NODEFS, Signal.IMAGEFS_INODES])
def test_a_pod_that_seems_to_use_more_than_the_capacity_is_evicted_only_in_the_kubelets_order(signal: Signal) -> None:
    """A kubelet believes it. So does its order here, within reason: only what is off by orders of magnitude is a number
    gone wrong. Our own order takes it for one at once, except for the bytes of files, which may share blocks."""
    capacity = snapshot().observations[signal].capacity
    assert capacity is not None

    def pod_with(name: str, amount: int) -> PodView:
        disk_usage = {"disk": DiskUsage(amount, amount, 0, 0, 0, 0), "process_count": amount, "thread_count": amount}
        return view(name, amount, usage_more=disk_usage)

    for times, kubelet, expected in (
        (4, True, "much"),
        (4, False, "much" if signal is Signal.NODEFS else "some"),
        (5000, True, "some"),
        (5000, False, "some"),
    ):
        made = config(hard(signal, 1000), ranking=RankingConfig(kubelet=kubelet))
        much, some = pod_with("much", times * capacity), pod_with("some", capacity // 4)
        assert victims(made, much, some, available={signal: 10}) == [expected], (times, kubelet)


def test_a_thread_leak_is_evicted_unless_in_the_kubelets_order_which_counts_processes() -> None:
    others = [view(f"i{n:02}", MI, usage_more={"process_count": 12, "thread_count": 20}) for n in range(20)]
    leak = view("leak", MI, usage_more={"process_count": 1, "thread_count": 28_000})
    for kubelet, expected in ((False, "leak"), (True, "i00")):
        made = config(hard(Signal.PID, 1638), ranking=RankingConfig(kubelet=kubelet))
        assert victims(made, *others, leak, available={Signal.PID: 1600})[0] == expected


def test_the_compatible_example_evicts_pod_after_pod_of_any_owner_and_of_any_relief() -> None:
    """As a kubelet does: only compiled-in protections apply, and no limit counts the evictions."""
    made = load(str(REPOSITORY / "examples" / "kubelet-compatible.yaml")).config
    daemon = Owner("DaemonSet", "d", "ds-d")
    pods = [view(f"{n:02}", GI, namespace="kube-system", owner=daemon, age_s=1.0) for n in range(12)]
    pods += [view("bare", GI, owner=None), view("mirror", GI, mirror_of="hash")]
    state, at = initial("t", now=NOW), NOW
    gone: list[str | None] = []
    while len(gone) < 13:
        plan, state = decide(snapshot(*pods, at=at, available={Signal.MEMORY: MI}), state, now=at, config=made)
        [victim] = plan.victims
        gone.append(victim.pod.name)
        pods = [each for each in pods if each.pod is not victim.pod]
        at += 10
    assert gone == [f"{n:02}" for n in range(12)] + ["bare"]
    plan, _ = decide(snapshot(*pods, at=at, available={Signal.MEMORY: MI}), state, now=at, config=made)
    assert not plan.victims, "the rest is the mirror of a static pod"


@pytest.mark.parametrize("freed", [True, False])
def test_the_compatible_example_cleans_up_before_it_evicts_for_a_disk(freed: bool) -> None:
    """Ended containers, then images, as a kubelet does (KUBELET-CONTRACT 4), and no victim if that is enough."""
    made = load(str(REPOSITORY / "examples" / "kubelet-compatible.yaml")).config
    holder = view("holder", usage_more={"disk": DiskUsage(volumes_bytes=2 * GI)})
    tried: list[str] = []
    evicted: list[str | None] = []
    state = initial("t", now=NOW)
    for at in range(10):
        available = 50 * GI if freed and len(tried) == 2 else GI
        seen = snapshot(holder, at=NOW + at, available={Signal.NODEFS: available, Signal.IMAGEFS: available})
        plan, state = decide(seen, state, now=NOW + at, config=made)
        for order in plan.reclaims:
            tried.append(order.name)
            outcome = ReclaimOutcome(plan.id, order.name, ReclaimResult.DONE, "", NOW + at + 0.5)
            state = apply_reclaim(state, outcome)
        evicted += [victim.pod.name for victim in plan.victims]
    assert tried == ["ended-containers", "unused-images"]
    assert evicted == ([] if freed else ["holder"])
    assert not made.conditions.taint


def test_the_memory_of_a_pod_is_the_sum_of_its_containers_only_where_its_own_is_missing() -> None:
    """No difference either (KUBELET-CONTRACT 1)."""

    def uses(name: str, own: int | None, *containers: int | None) -> object:
        each = tuple(ContainerUsage(f"{name}{n}", f"c{n}", size, None) for n, size in enumerate(containers))
        return view(name, own, usage_more={"containers": each})

    made = config(hard(Signal.MEMORY, 1000), ranking=KUBELET)
    pods = (uses("own", 5 * MI, 90 * MI), uses("sum", None, 4 * MI, 2 * MI), uses("unknown", None, 99 * MI, None))
    assert order(made, *pods, available={Signal.MEMORY: 10}) == ["sum", "own", "unknown"]
    assert victims(made, *pods[:2], available={Signal.MEMORY: 10}) == ["sum"]
    assert victims(made, *pods, available={Signal.MEMORY: 10}) == [], "the third may hold all the rest"


def test_inodes_are_not_compared_with_a_request_in_bytes() -> None:
    def holder(name: str, inodes: int, request: int) -> object:
        containers = (Container("c", requests=Resources(ephemeral_storage=request)),)
        return view(name, MI, containers=containers, usage_more={"disk": DiskUsage(0, inodes, 0, 0, 0, 0)})

    made = config(hard(Signal.NODEFS_INODES, 1000), ranking=KUBELET)
    starved = {Signal.NODEFS_INODES: 10}
    # The kubelet would compare 90000 - 10 Gi with 5 - 0.
    pods = (holder("few", 5, 0), holder("many", 90_000, 10 << 30))
    assert order(made, *pods, available=starved) == ["many", "few"]


@pytest.mark.parametrize("signal", [Signal.MEMORY, Signal.NODEFS])
def test_a_pod_without_stats_is_not_first(signal: Signal) -> None:
    made = config(hard(signal, 1000), ranking=KUBELET)
    known = view("known", 500 * MI, usage_more={"disk": DiskUsage(MI, 5, MI, 5, MI, 5)})
    starting = not_started(pod("a-starting-one", priority=1000))
    pods = (known._replace(pod=starting, usage=None), known)
    assert order(made, *pods, available={signal: 10}) == ["known", "a-starting-one"]
    assert victims(made, *pods, available={signal: 10}) == ["known"]
    unmeasured = known._replace(pod=starting, usage=usage(starting, None))
    assert order(made, unmeasured, known, available={signal: 10}) == ["known", "a-starting-one"]


def test_on_a_split_imagefs_the_smallest_request_is_not_evicted_first() -> None:
    def asks(name: str, request: int) -> object:
        containers = (Container("c", requests=Resources(ephemeral_storage=request)),)
        return view(name, MI, containers=containers, usage_more={"disk": DiskUsage(MI, 5, MI, 5, MI, 5)})

    made = config(hard(Signal.IMAGEFS, 1000), ranking=KUBELET)
    of = {"available": {Signal.IMAGEFS: 10}, "layout": DiskLayout.SPLIT}
    assert order(made, asks("a", 9), asks("b", 1), **of) == ["a", "b"]
    assert order(made, asks("a", 1), asks("b", 9), **of) == ["a", "b"]


def test_a_negative_maximum_grace_is_rejected_and_the_default_leaves_time_to_stop() -> None:
    (problem,) = problems("evictionMaxPodGracePeriod: -1\n")
    assert "evictionMaxPodGracePeriod" in str(problem)
    made = config(soft(Signal.MEMORY, 1000, grace_s=0.001))
    shot = snapshot(view("hog", 5000), available={Signal.MEMORY: 10})
    _, state = decide(shot, initial("t", now=NOW), now=NOW, config=made)
    later = snapshot(view("hog", 5000), available={Signal.MEMORY: 10}, at=NOW + 1)
    plan, _ = decide(later, state, now=NOW + 1, config=made)
    assert [victim.grace_period_s for victim in plan.victims] == [30.0]
