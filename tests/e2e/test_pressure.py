"""The agent under real pressure: it runs on this node beside the kubelet, and real processes in real pods take memory,
disk and processes until it acts. Victims, conditions, taints, Events, PDBs and recovery are asserted.

Skipped with the reason where the tests do not run as root on a node of the cluster, or where that node has too little
to spare for a load that stays far from a kubelet's own thresholds.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.this_node import Load, ThisNode, Threshold, agent, container_cgroups, marks, most_processes, why_not
from tests.e2e.watch_log import WatchedState, WatchLog
from tests.support.livenode import Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MIB = 1 << 20
LONG_S = 120.0
"""For what takes a second or two on a node of today: an emulated one was seen to be ten times slower."""


class Pressure(NamedTuple):
    """One way to put a node under pressure. Amounts are in units of the load."""

    signal: str
    condition: str
    taint: str
    resource: str
    load: str
    unit: int
    """What one unit of load takes from the signal."""
    gap: int
    """How far below what is available now the threshold is put: more than a quiet node moves by itself. (200 PIDs were
    not: a test suite beside it, or an agent with its pods, comes and goes with as many.)"""
    extra: int
    """What is taken beyond the threshold, so that it stays met."""
    step: int
    keeps: int
    """What has to be left, whatever the rest of the node does and however low the kubelet's own thresholds are."""
    keeps_share: float = 0.0
    slack: int = 128
    """What may be taken beyond gap and extra where the rest of the node gives back as much meanwhile."""
    drains: tuple[str, ...] = ()
    """Further signals that the load takes from, where their file system is the same."""

    @property
    def standard_taint(self) -> str:
        """What the control plane makes of the standard condition."""
        return self.taint.replace("nodeagent.io/", "node.kubernetes.io/")

    @property
    def cap(self) -> int:
        """Most that is ever taken."""
        return self.gap + self.extra + self.slack


MEMORY = Pressure(
    "memory.available", "MemoryPressure", "nodeagent.io/memory-pressure", "memory", "memory", MIB, 192, 128, 16, 384
)._replace(drains=("allocatableMemory.available",))
PODS_MEMORY = MEMORY._replace(signal="allocatableMemory.available", drains=("memory.available",))
DISK = Pressure(
    "nodefs.available", "DiskPressure", "nodeagent.io/disk-pressure", "ephemeral-storage", "disk", MIB, 128, 64, 16, 512
)._replace(keeps_share=0.25, drains=("imagefs.available",))
PIDS = Pressure(
    "pid.available", "PIDPressure", "nodeagent.io/pid-pressure", "pids", "pids", 1, 400, 600, 100, 1000, slack=1000
)


@pytest.fixture(scope="module")
def idle(cluster: Cluster) -> Iterator[tuple[ThisNode, Json]]:
    """This node, and a pod on it that does nothing and must outlive everything."""
    if reason := why_not(cluster):
        pytest.skip(reason)
    node = ThisNode(cluster)
    pod = node.start_pod("idle")
    places = container_cgroups(pod)
    if not places:
        pytest.skip("the pods' cgroups are not to be seen from here")
    if any(not (place / "cgroup.procs").exists() for place in places) or not node.volume(pod).is_dir():
        pytest.skip(f"the pods' directories are not at {node.kubelet_dir}: NODEAGENT_E2E_SAMPLING may configure them")
    yield node, pod
    node.remove_pod("idle")


@pytest.fixture
def node(idle: tuple[ThisNode, Json]) -> ThisNode:
    return idle[0]


@pytest.fixture
def watch_log(cluster: Cluster) -> Iterator[WatchLog]:
    kept = WatchLog(cluster)
    yield kept
    kept.close()


@pytest.fixture
def bloat(node: ThisNode) -> Iterator[Callable[[Pressure], Load]]:
    """Starts the pod `hog`, whose load grows on demand."""
    loads = []

    def start(pressure: Pressure) -> Load:
        pod = node.start_pod("hog", labels={"app": "hog"})
        if pressure.load == "pids" and most_processes(pod) < pressure.cap + 100:
            pytest.skip(f"a pod of this node may have {most_processes(pod)} processes and threads only")
        loads.append(Load(pressure.load, pod, node.volume(pod)))
        return loads[-1]

    yield start
    for load in loads:
        load.close()
    node.remove_pod("hog")


def threshold(node: ThisNode, pressure: Pressure, directory: Path, *, soft_grace: str) -> Threshold:
    """Just below what is available now. Skips where that or the load would come near to what the node needs."""
    figures = node.figures(directory)
    seen = figures[pressure.signal]
    if seen["available"] is None:
        pytest.skip(f"this node has no {pressure.signal}: {seen['reason']}")
    for name in (pressure.signal, *pressure.drains):
        if name == pressure.signal or taken_from(figures[name], seen):
            check_headroom(node, pressure, figures[name])
    return Threshold(pressure.signal, str(seen["available"] - pressure.gap * pressure.unit), soft_grace)


def taken_from(figure: Json, seen: Json) -> bool:
    """Whether what one signal has is known, and the other one's load takes from it, too."""
    same = figure["name"].startswith(("memory.", "allocatableMemory.")) or figure["capacity"] == seen["capacity"]
    return figure["available"] is not None and same


def check_headroom(node: ThisNode, pressure: Pressure, figure: Json) -> None:
    """Skips where the load would leave too little, or bring the kubelet's own thresholds near."""
    left = figure["available"] - pressure.cap * pressure.unit
    kubelets = node.kubelets(figure["name"], figure["capacity"])
    if kubelets:
        kubelets += pressure.extra * pressure.unit
    needed = max(pressure.keeps * pressure.unit, int(pressure.keeps_share * figure["capacity"]), kubelets)
    if left < needed:
        pytest.skip(
            f"{figure['name']} is {figure['available']}; {needed} would not be left for the node and its kubelet"
        )


def wait_until_calm(watch_log: WatchLog, pressure: Pressure, run: Run) -> None:
    own = f"NodeAgent{pressure.condition}"
    watch_log.wait(
        lambda: watch_log.node() and watch_log.node()[-1].has_status(own, "False"),
        f"{own} False before the load; last lines of the agent: {last_words(run)}",
        timeout_s=LONG_S,
    )


def press(watch_log: WatchLog, pressure: Pressure, load: Load, run: Run) -> None:
    """Take until the agent reports pressure, and a little more; the hard tier may be faster than that."""
    own = f"NodeAgent{pressure.condition}"
    while not watch_log.seen(lambda: watch_log.node()[-1].has_status(own, "True"), 0.5):
        assert load.taken < pressure.cap, f"no {own} after {load.taken}: {last_words(run)}"
        if not load.take(pressure.step):
            break
    load.take(pressure.extra)
    watch_log.wait(
        lambda: any(entry.has_status(own, "True") for entry in watch_log.node()), f"{own} True", timeout_s=LONG_S
    )


def last_words(run: Run) -> list[Json]:
    """The last log lines of the agent, without repeated ones."""
    return [line for line in run.events() if line["event"] != "note"][-8:]


def first(entries: list[WatchedState], holds: Callable[[WatchedState], bool]) -> WatchedState | None:
    return next((entry for entry in entries if holds(entry)), None)


def check_recovery(node: ThisNode, watch_log: WatchLog, pressure: Pressure, run: Run) -> None:
    """The conditions are False again, the taint is down, and the idle pods still run."""

    def recovered() -> bool:
        last = watch_log.node()[-1]
        calm = last.has_status(f"NodeAgent{pressure.condition}", "False") and last.has_status(
            pressure.condition, "False"
        )
        return calm and not last.tainted(pressure.taint) and not last.tainted(pressure.standard_taint)

    if not watch_log.seen(recovered, LONG_S):
        last = watch_log.node()[-1].object
        pytest.fail(
            f"no recovery within {LONG_S:.0f}s: {last['spec']}, {last['status']['conditions']}, {last_words(run)}"
        )
    assert not any(entry.terminating for entry in watch_log.pods("idle"))
    assert node.cluster.get(node.cluster.pod_path("idle"))["status"]["phase"] == "Running"


def check_end(node: ThisNode, watch_log: WatchLog, run: Run) -> None:
    """A clean end takes everything back."""
    assert run.stop() == 0, last_words(run)  # within the 20 s that daemonset.yaml grants
    assert not run.logged("cleanup incomplete")
    watch_log.wait(
        lambda: not marks(watch_log.node()[-1].object), "what is ours is taken back at the end", timeout_s=LONG_S
    )
    assert not marks(node.cluster.node())


def check_events(cluster: Cluster, pressure: Pressure, hog: Json, run: Run) -> None:
    """Events on the pod and on the node report the eviction, with the decision's id."""
    [accepted] = run.logged("eviction accepted")

    def events_about(namespace: str, reason: str, about: tuple[str, str], plans: set[str]) -> list[Json]:
        found = cluster.get(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")["items"]
        return [e for e in found if e.get("reason") == reason and _about(e) == about and _plan(e) in plans]

    def on_the_pod() -> list[Json]:
        return events_about(cluster.namespace, "Evicted", ("Pod", "hog"), {accepted["id"]})

    def on_the_node() -> list[Json]:
        # One Event for every try: a second one, after an answer that got lost, makes the series of the first longer.
        tries = {line["id"] for line in run.logged("evicting")}
        return events_about("default", "EvictionThresholdMet", ("Node", cluster.node_name), tries)

    assert cluster.until(on_the_pod, timeout_s=60), last_words(run)
    assert cluster.until(on_the_node, timeout_s=60), last_words(run)
    [event] = on_the_pod()
    assert event["regarding"]["uid"] == hog["metadata"]["uid"]
    assert event["type"] == "Warning"
    assert event["metadata"]["annotations"]["starved_resource"] == pressure.resource
    assert f"low on resource: {pressure.resource}" in event["note"]


def _about(event: Json) -> tuple[object, object]:
    return event.get("regarding", {}).get("kind"), event.get("regarding", {}).get("name")


def _plan(event: Json) -> object:
    return (event["metadata"].get("annotations") or {}).get("nodeagent.io/plan")


def check_eviction(node: ThisNode, watch_log: WatchLog, pressure: Pressure, load: Load, run: Run) -> WatchedState:
    """The hog was evicted, and no other pod. Returns its first terminating state."""
    if not watch_log.seen(lambda: any(e.terminating for e in watch_log.pods("hog")), LONG_S):
        pytest.fail(f"no eviction within {LONG_S:.0f}s: {last_words(run)}")
    going = first(watch_log.pods("hog"), lambda entry: entry.terminating)
    assert going is not None
    assert going.condition("DisruptionTarget")["reason"] == "EvictionByEvictionAPI"
    assert load.ended(LONG_S), "the pod's processes outlive its eviction"
    watch_log.wait(
        lambda: watch_log.pods("hog")[-1].what == "DELETED", "the evicted pod's object goes", timeout_s=LONG_S
    )
    # The log is written by another thread than the request.
    assert node.cluster.until(lambda: run.logged("eviction accepted"), timeout_s=LONG_S), last_words(run)
    assert {line["pod"] for line in run.logged("evicting")} == {f"{node.cluster.namespace}/hog"}
    check_events(node.cluster, pressure, going.object, run)
    return going


@pytest.mark.parametrize("pressure", [MEMORY, PODS_MEMORY, DISK], ids=lambda pressure: pressure.signal)
def test_pressure_costs_the_pod_that_made_it_and_is_over_when_it_is_gone(
    node: ThisNode, watch_log: WatchLog, bloat: Callable[[Pressure], Load], tmp_path: Path, pressure: Pressure
) -> None:
    load = bloat(pressure)
    limit = threshold(node, pressure, tmp_path, soft_grace="3s")
    with agent(node, tmp_path, limit) as run:
        wait_until_calm(watch_log, pressure, run)
        press(watch_log, pressure, load, run)
        going = check_eviction(node, watch_log, pressure, load, run)
        true = first(watch_log.node(), lambda entry: entry.has_status(pressure.condition, "True"))
        tainted = first(watch_log.node(), lambda entry: entry.tainted(pressure.taint))
        assert true is not None
        assert tainted is not None
        assert true.version < going.version
        assert tainted.version < going.version, "the taint is up before the first eviction"
        assert true.condition(pressure.condition)["reason"].startswith("NodeAgent")
        assert first(watch_log.node(), lambda entry: entry.tainted(pressure.standard_taint)) is not None
        # A kubelet puts its own False there every 10 s. The answer takes some 10 ms, on a busy machine more.
        assert watch_log.lost_s(pressure.condition, own=f"NodeAgent{pressure.condition}", until=going.at) < 1.0
        check_recovery(node, watch_log, pressure, run)
        check_end(node, watch_log, run)


def test_a_hard_threshold_does_not_wait_and_leaves_a_second(
    node: ThisNode, watch_log: WatchLog, bloat: Callable[[Pressure], Load], tmp_path: Path
) -> None:
    load = bloat(PIDS)
    limit = threshold(node, PIDS, tmp_path, soft_grace="")
    with agent(node, tmp_path, limit) as run:
        wait_until_calm(watch_log, PIDS, run)
        press(watch_log, PIDS, load, run)
        going = check_eviction(node, watch_log, PIDS, load, run)
        assert going.object["metadata"]["deletionGracePeriodSeconds"] == 1
        assert first(watch_log.node(), lambda entry: entry.tainted(PIDS.taint)) is not None
        check_recovery(node, watch_log, PIDS, run)
        check_end(node, watch_log, run)


def test_a_pdb_blocks_the_soft_tier_as_long_as_it_exists(
    cluster: Cluster, node: ThisNode, watch_log: WatchLog, bloat: Callable[[Pressure], Load], tmp_path: Path
) -> None:
    pressure = PIDS
    pdbs = f"/apis/policy/v1/namespaces/{cluster.namespace}/poddisruptionbudgets"
    load = bloat(pressure)
    limit = threshold(node, pressure, tmp_path, soft_grace="3s")
    selector = {"matchLabels": {"app": "hog"}}
    cluster.post(
        pdbs,
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "hog"},
            "spec": {"minAvailable": 1, "selector": selector},
        },
    )
    try:
        with agent(node, tmp_path, limit) as run:
            wait_until_calm(watch_log, pressure, run)
            press(watch_log, pressure, load, run)
            watch_log.wait(lambda: watch_log.node()[-1].tainted(pressure.taint), "the taint", timeout_s=LONG_S)
            refusal = "PodDisruptionBudget hog allows 0 disruptions"
            assert cluster.until(lambda: refusal in str(run.logged("not evicting")), timeout_s=LONG_S), last_words(run)
            assert not watch_log.seen(lambda: any(e.terminating for e in watch_log.pods("hog")), 5.0)
            assert not run.logged("evicting")
            assert not load.ended(0.0)
            cluster.delete(f"{pdbs}/hog")
            check_eviction(node, watch_log, pressure, load, run)
            check_recovery(node, watch_log, pressure, run)
            check_end(node, watch_log, run)
    finally:
        cluster.delete(f"{pdbs}/hog")


def test_an_agent_that_ends_under_pressure_removes_what_it_has_set_and_evicts_nothing(
    node: ThisNode, watch_log: WatchLog, bloat: Callable[[Pressure], Load], tmp_path: Path
) -> None:
    load = bloat(PIDS)
    limit = threshold(node, PIDS, tmp_path, soft_grace="10m")
    with agent(node, tmp_path, limit) as run:
        wait_until_calm(watch_log, PIDS, run)
        press(watch_log, PIDS, load, run)
        watch_log.wait(lambda: watch_log.node()[-1].tainted(PIDS.taint), "the taint", timeout_s=LONG_S)
        watch_log.wait(
            lambda: watch_log.node()[-1].has_status("PIDPressure", "True"), "PIDPressure True", timeout_s=LONG_S
        )
        check_end(node, watch_log, run)
        watch_log.wait(
            lambda: watch_log.node()[-1].has_status("PIDPressure", "False"), "PIDPressure False", timeout_s=LONG_S
        )
    assert not any(entry.terminating for entry in watch_log.pods())
