import json

from nodeagent.config.kubelet import KubeletThresholds
from nodeagent.model import (
    Amount,
    HugePages,
    Note,
    NoteKind,
    PodSource,
    Refusal,
    RefusalCode,
    Signal,
    SignalState,
    Threshold,
    Trend,
)
from nodeagent.report.json_document import to_json
from tests.support import reports, schemas
from tests.support.reports import GIB, MIB

FULL = reports.report(
    pods=(
        reports.ranked(reports.pod_view("web", working_set=5 * MIB, estimate=64 * MIB), 1),
        reports.ranked(
            reports.pod_view("db", working_set=7 * MIB, source=PodSource.API),
            2,
            refusals=(Refusal(RefusalCode.BARE_POD, "no controller"),),
        ),
    ),
    kubelet=KubeletThresholds("/var/lib/kubelet/config.yaml", (reports.HARD_MEMORY, reports.HARD_NODEFS)),
    notes=(Note(NoteKind.PSI, "not built into this kernel"),),
    memory=reports.memory(hugepages=(HugePages(2 * MIB, 64, 12, 0),)),
)


def test_a_report_matches_the_strict_schema() -> None:
    document = json.loads(json.dumps(to_json(FULL), allow_nan=False))
    assert list(schemas.strict().iter_errors(document)) == []
    assert (document["apiVersion"], document["kind"], document["node"]) == (
        "nodeagent.io/v1alpha1",
        "NodeReport",
        "node-1",
    )
    assert document["time"] == "2026-11-21T00:12:28.250Z"


def test_the_schema_notices_a_field_of_the_wrong_type_and_one_that_is_missing() -> None:
    document = to_json(FULL)
    document["signals"][0]["available"] = "2Gi"
    del document["pods"][0]["uid"]
    assert len(list(schemas.strict().iter_errors(document))) == 2


def test_every_signal_is_there_with_numbers_as_integers_and_null_with_a_reason_when_unknown() -> None:
    signals = {signal["name"]: signal for signal in to_json(FULL)["signals"]}
    assert set(signals) == set(Signal)
    memory = signals["memory.available"]
    assert (memory["available"], memory["capacity"]) == (2 * GIB, 4 * GIB)
    assert (memory["threshold"], memory["headroom"]) == (300 * MIB, 2 * GIB - 300 * MIB)
    assert memory["ageSeconds"] == 1.5
    assert [(each["tier"], each["value"]) for each in memory["thresholds"]] == [
        ("hard", 200 * MIB),
        ("soft", 300 * MIB),
    ]
    unknown = signals["allocatableMemory.available"]
    assert (unknown["available"], unknown["headroom"]) == (None, None)
    assert (unknown["state"], unknown["reason"]) == ("unknown", "no kubepods cgroup")


def test_signals_on_one_device_name_the_first_that_reads_it() -> None:
    shared = {signal["name"]: signal["sameFileSystemAs"] for signal in to_json(FULL)["signals"]}
    assert shared["nodefs.available"] is None
    assert shared["imagefs.available"] == shared["containerfs.available"] == "nodefs.available"
    assert shared["imagefs.inodesFree"] == "nodefs.inodesFree"


def test_the_facts_of_a_pod_have_their_source() -> None:
    web, db = to_json(FULL)["pods"]
    assert (web["name"], web["rank"], web["memoryRequestBytes"], web["protectedBy"]) == ("web", 1, 64 * MIB, [])
    assert web["sources"]["memoryRequestBytes"] == "estimate"
    assert web["sources"]["name"] == "host"
    assert web["sources"]["priority"] is None
    assert db["sources"]["memoryRequestBytes"] == "api"
    assert db["protectedBy"] == [{"code": "bare-pod", "message": "no controller"}]


def test_a_pod_without_a_cgroup_has_no_usage_rather_than_none_at_all() -> None:
    view = reports.pod_view("new", working_set=1, source=PodSource.API)._replace(usage=None)
    report = reports.report(pods=(reports.ranked(view, 1),))
    document = to_json(report)
    assert list(schemas.strict().iter_errors(document)) == []
    assert document["pods"][0]["memoryWorkingSetBytes"] is None
    assert document["pods"][0]["ageSeconds"] is None


def test_a_report_of_a_node_without_meminfo_psi_pods_or_kubelet_is_still_valid() -> None:
    report = reports.report(memory=None, stalls=(), cgroups=())
    document = to_json(report)
    assert list(schemas.strict().iter_errors(document)) == []
    assert document["pods"] == []
    assert document["kubelet"] is None
    assert document["memory"]["swap"] is None


def test_the_headroom_of_a_memavailable_threshold_is_computed_from_memavailable() -> None:
    seen = reports.observations()
    verdict = reports.judged(seen[Signal.MEMORY], SignalState.OK, (reports.MEMAVAILABLE, MIB))
    signal = to_json(reports.report(signals=(verdict,)))["signals"][0]
    assert signal["headroom"] == 3 * GIB - MIB
    assert signal["thresholds"][0]["memoryModel"] == "memavailable"


def test_a_trend_is_shown_where_there_is_one() -> None:
    seen = reports.observations()
    verdict = reports.judged(seen[Signal.PID])._replace(trend=Trend(-5.0, None, 60.0, 0.9))
    document = to_json(reports.report(signals=(verdict,)))
    assert document["signals"][0]["trend"]["toExhaustionSeconds"] == 60.0
    assert list(schemas.strict().iter_errors(document)) == []


def test_a_kubelet_with_a_higher_threshold_acts_first_and_a_lower_one_does_not() -> None:
    def verdict(*kubelets: Threshold) -> list[str]:
        report = reports.report(kubelet=KubeletThresholds("/k", kubelets))
        kubelet = to_json(report)["kubelet"]
        assert kubelet is not None
        return [each["verdict"] for each in kubelet["thresholds"]]

    def memory(size: int, grace_period_s: float = 0.0) -> Threshold:
        return Threshold(Signal.MEMORY, Amount(size * MIB, None, f"{size}Mi"), grace_period_s)

    # Ours: hard 200Mi, soft 300Mi for 30 s.
    assert verdict(memory(100), memory(300), memory(350)) == ["ours first", "kubelet first", "kubelet first"]
    # The soft one is met before these, and acts first if they are not met within 30 s.
    assert verdict(memory(200), memory(250)) == ["soft first", "soft first"]
    assert verdict(memory(250, 60.0), memory(250, 10.0)) == ["ours first", "soft first"]
    # Ours has nothing on inodes here.
    assert verdict(Threshold(Signal.NODEFS_INODES, Amount(None, 5.0, "5%"))) == ["kubelet first"]
    # 10% of 20 GiB is met after our 12%.
    assert verdict(Threshold(Signal.NODEFS, Amount(None, 10.0, "10%"))) == ["ours first"]
