"""Which pod, container or service OOM kills belong to, and why they happened."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import (
    Container,
    ContainerUsage,
    LoggedKill,
    OomCause,
    OomCount,
    OomEvents,
    OomLevel,
    OomPlace,
    PodView,
)
from nodeagent.policy import oom_attribution
from tests.support import nodes

MAIN, SIDE = "a" * 64, "b" * 64
QOS = OomPlace("/kubepods/burstable", OomLevel.KUBEPODS)
KUBEPODS = OomPlace("/kubepods", OomLevel.KUBEPODS)
POD = OomPlace("/kubepods/burstable/pod1", OomLevel.POD, "uid-shop-web")
CONTAINER = OomPlace(f"{POD.path}/{MAIN}", OomLevel.CONTAINER, POD.cgroup_uid, MAIN)
SIDECAR = OomPlace(f"{POD.path}/{SIDE}", OomLevel.CONTAINER, POD.cgroup_uid, SIDE)
SERVICE = OomPlace("/system.slice/db.service", OomLevel.HOST)
SLICE = OomPlace("/system.slice", OomLevel.HOST)


def view() -> PodView:
    pod = nodes.pod("web", containers=(Container("main", container_id=MAIN), Container("proxy", container_id=SIDE)))
    containers = (ContainerUsage(MAIN, "main", None, 2), ContainerUsage(SIDE, "proxy", None, 1))
    return PodView(pod, nodes.usage(pod, containers=containers)._replace(cgroup=POD.path))


PODS = {POD.cgroup_uid: view()}
_numbers = itertools.count(1)


def line(place: OomPlace | None, limit: OomPlace | None = None, name: str = "python3") -> LoggedKill:
    number = next(_numbers)
    return LoggedKill(number, number / 10, number, name, 1 << 20, place, limit)


def count(place: OomPlace, *, ooms: int = 0, kills: int = 0, groups: int = 0, gone: OomEvents | None = None,
          present: tuple[str, ...] = ()) -> OomCount:  # fmt: skip
    return OomCount(place, OomEvents(ooms, kills, groups), gone or OomEvents(), frozenset(present))


TABLE = {
    "own limit of the container": ([count(CONTAINER, ooms=1, kills=1)], "shop/web", "main", OomCause.CONTAINER_LIMIT),
    "limit of the pod": (
        [count(CONTAINER, kills=1), count(POD, ooms=1)],
        "shop/web",
        "main",
        OomCause.POD_LIMIT,
    ),
    "allocatable": ([count(SIDECAR, kills=1), count(KUBEPODS, ooms=1)], "shop/web", "proxy", OomCause.ALLOCATABLE),
    "limit of the QoS class": (
        [count(SIDECAR, kills=1), count(QOS, ooms=1)],
        "shop/web",
        "proxy",
        OomCause.ALLOCATABLE,
    ),
    "shortage of the node": ([count(CONTAINER, kills=1)], "shop/web", "main", OomCause.NODE),
    "limit of another container": (
        [count(CONTAINER, kills=1), count(SIDECAR, ooms=3)],
        "shop/web",
        "main",
        OomCause.NODE,
    ),
    "limit of a service": ([count(SERVICE, ooms=1, kills=1)], "", "", OomCause.HOST_LIMIT),
    "a service, for the node": ([count(SERVICE, kills=1)], "", "", OomCause.NODE),
    "a container that is gone": (
        [count(POD, gone=OomEvents(1, 1, 0), present=(SIDE,))],
        "shop/web",
        "main",
        OomCause.CONTAINER_LIMIT,
    ),
    "a container that is gone, for the node": (
        [count(POD, gone=OomEvents(0, 1, 0), present=(SIDE,))],
        "shop/web",
        "main",
        OomCause.NODE,
    ),
    "one of two containers that are gone": ([count(POD, gone=OomEvents(0, 1, 0))], "shop/web", "", OomCause.NODE),
    "a pod that is gone": ([count(QOS, gone=OomEvents(0, 1, 0))], "shop/web", "", OomCause.NODE),
    "a pod that is gone, by its limit": ([count(QOS, gone=OomEvents(1, 1, 0))], "shop/web", "", OomCause.POD_LIMIT),
    "a service that is gone": ([count(SLICE, gone=OomEvents(1, 1, 0))], "", "", OomCause.HOST_LIMIT),
    "cgroup v1": (
        [count(CONTAINER, kills=1)._replace(causes_known=False)],
        "shop/web",
        "main",
        OomCause.UNKNOWN,
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_without_a_log_the_counters_attribute(case: str) -> None:
    counts, pod, container, cause = TABLE[case]
    result = oom_attribution.attribute(1, counts, [], PODS)
    [kill] = result.kills
    assert (kill.number, kill.pod, kill.container, kill.cause) == (1, pod, container, cause)
    assert kill.victim == ("pod" if pod else "host")
    assert result.ahead == 0


def test_child_processes_are_kills_of_their_container() -> None:
    [kill] = oom_attribution.attribute(3, [count(CONTAINER, ooms=1, kills=3)], [], PODS).kills
    assert (kill.number, kill.container, kill.group) == (3, "main", False)


def test_a_group_kill_is_marked() -> None:
    [kill] = oom_attribution.attribute(3, [count(CONTAINER, ooms=1, kills=3, groups=1)], [], PODS).kills
    assert (kill.number, kill.group) == (3, True)


def test_the_log_names_processes_and_the_limit() -> None:
    lines = [line(CONTAINER, POD, "python3"), line(CONTAINER, None, "sh")]
    kills = oom_attribution.attribute(2, [count(CONTAINER, ooms=1, kills=2)], lines, PODS).kills
    assert [(kill.cause, kill.limit, [each.name for each in kill.processes]) for kill in kills] == [
        (OomCause.POD_LIMIT, POD.path, ["python3"]),
        (OomCause.NODE, "", ["sh"]),
    ]


def test_the_log_attributes_a_pod_that_no_sample_has_seen() -> None:
    place = OomPlace(f"/kubepods/burstable/pod2/{MAIN}", OomLevel.CONTAINER, "uid-2", MAIN)
    [kill] = oom_attribution.attribute(1, [count(QOS, gone=OomEvents(0, 1, 0))], [line(place)], {}).kills
    assert (kill.pod, kill.container, kill.place) == ("uid/uid-2", MAIN[:12], place)


def test_the_log_attributes_a_service_that_is_gone() -> None:
    [kill] = oom_attribution.attribute(1, [count(SLICE, gone=OomEvents(0, 1, 0))], [line(SERVICE)], PODS).kills
    assert (kill.place, kill.cause) == (SERVICE, OomCause.NODE)


def test_a_process_of_the_root_cgroup_is_attributed_by_the_log_alone() -> None:
    root = OomPlace("/", OomLevel.HOST)
    [kill] = oom_attribution.attribute(1, [], [line(root)], PODS).kills
    assert (kill.place, kill.victim) == (root, "host")


def test_the_log_never_adds_a_kill() -> None:
    result = oom_attribution.attribute(0, [], [line(CONTAINER), line(None)], PODS)
    assert result.kills == ()
    assert len(result.unused) == 2
    result = oom_attribution.attribute(1, [count(CONTAINER, kills=1)], [line(SIDECAR), line(CONTAINER)], PODS)
    assert [kill.container for kill in result.kills] == ["main"]
    assert [each.place for each in result.unused] == [SIDECAR]


def test_what_nothing_accounts_for_is_one_unattributed_kill() -> None:
    kills = oom_attribution.attribute(5, [count(CONTAINER, kills=2)], [line(None, name="x")], PODS).kills
    assert [(kill.number, kill.victim) for kill in kills] == [(2, "pod"), (3, "unattributed")]
    assert [each.name for each in kills[1].processes] == ["x"]


def test_a_kill_after_the_total_was_read_is_counted_ahead() -> None:
    assert oom_attribution.attribute(1, [count(CONTAINER, kills=3)], [], PODS).ahead == 2


def test_a_limit_that_was_read_before_its_kill_is_its_cause() -> None:
    merged = oom_attribution.merge_ooms([count(CONTAINER, kills=1)], {CONTAINER: OomEvents(1, 0, 0)})
    [kill] = oom_attribution.attribute(1, merged, [], PODS).kills
    assert kill.cause is OomCause.CONTAINER_LIMIT


def test_a_limit_above_kubepods_bounds_all_pods_together() -> None:
    counts = [count(CONTAINER, kills=1), count(SLICE._replace(path="/kubepods"), ooms=1)]
    [kill] = oom_attribution.attribute(1, counts, [], PODS).kills
    assert kill.cause is OomCause.ALLOCATABLE


PLACES = [CONTAINER, SIDECAR, POD, QOS, KUBEPODS, SERVICE, SLICE]
events = st.builds(OomEvents, st.integers(0, 3), st.integers(0, 4), st.integers(0, 1))
counts_lists = st.lists(
    st.builds(OomCount, st.sampled_from(PLACES), events, events), unique_by=lambda each: each.place, max_size=7
)
log_lists = st.lists(
    st.builds(
        line, st.sampled_from([*PLACES, OomPlace("/", OomLevel.HOST), None]), st.sampled_from([CONTAINER, POD, None])
    ),
    max_size=8,
)


@given(total=st.integers(0, 30), counts=counts_lists, log=log_lists, known=st.booleans())
def test_the_kills_sum_up_to_the_kernels_total(
    total: int, counts: list[OomCount], log: list[LoggedKill], known: bool
) -> None:
    """With the unattributed ones as the rest, and those that were counted after the total was read as `ahead`."""
    result = oom_attribution.attribute(total, counts, log, PODS if known else {})
    assert sum(kill.number for kill in result.kills) == total + result.ahead
    assert all(kill.number > 0 for kill in result.kills)
    counted = sum(each.own.kills + each.gone.kills for each in counts)
    assert result.ahead == max(0, counted - total)
    used = [process for kill in result.kills for process in kill.processes]
    assert len({each.pid for each in used}) == len(used), "each line names one kill"
    assert len(used) + len(result.unused) == len(log)
