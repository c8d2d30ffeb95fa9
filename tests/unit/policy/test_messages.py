import json
import re
from typing import Any

import pytest

from nodeagent.model import (
    Amount,
    ConditionStatus,
    Container,
    ContainerKind,
    ContainerUsage,
    DiskUsage,
    Observation,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    Resources,
    Signal,
    SignalState,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
)
from nodeagent.policy import messages
from tests.support.paths import DATA

MI = 1 << 20
KI = 1 << 10
RECORDED: dict[str, Any] = json.loads((DATA / "policy" / "kubelet-evictions.json").read_text())


def pod(*containers: Container, pod_requests: Resources | None = None) -> Pod:
    return Pod(
        "uid-1",
        "uid-1",
        "default",
        "web-0",
        PodSource.API,
        QOSClass.BURSTABLE,
        containers=containers,
        pod_requests=pod_requests,
    )


def usage(*containers: ContainerUsage, working_set: int | None = None) -> PodUsage:
    return PodUsage("uid-1", QOSClass.BURSTABLE, "/p", 0.0, memory_working_set=working_set, containers=containers)


def met(signal: Signal, value: Amount, *, resolved: int) -> ThresholdVerdict:
    return ThresholdVerdict(Threshold(signal, value), resolved, True, 0.0, True)


def observed(signal: Signal, available: int | None) -> Observation:
    return Observation(signal, available, 16 << 30, 0.0, "test")


def memory_eviction(view: PodView) -> messages.EvictionText:
    return messages.eviction_text(
        view,
        verdict=met(Signal.MEMORY, Amount(300 * MI, None, "300Mi"), resolved=300 * MI),
        observation=observed(Signal.MEMORY, 174488 * KI),
    )


# --- as a real kubelet wrote them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", RECORDED["pods"], ids=lambda each: each["metadata"]["name"])
def test_the_message_is_byte_for_byte_what_a_kubelet_wrote(recorded: dict[str, Any]) -> None:
    text: str = recorded["status"]["message"]
    threshold, available = re.findall(r"quantity: (\d+)Mi, available: (\d+)Ki", text)[0]
    used = re.findall(r"was using (\d+)Ki", text)
    (container,) = recorded["spec"]["containers"]
    assert container["resources"] == {}
    view = PodView(
        pod(Container(container["name"])),
        usage(*(ContainerUsage("id", container["name"], int(each) * KI, None) for each in used)),
    )
    value = Amount(int(threshold) * MI, None, f"{threshold}Mi")
    written = messages.eviction_text(
        view,
        verdict=met(Signal.MEMORY, value, resolved=int(threshold) * MI),
        observation=observed(Signal.MEMORY, int(available) * KI),
    )
    assert written.message == text


@pytest.mark.parametrize(
    "recorded",
    [each for each in RECORDED["events"] if each["reason"] == "Evicted"],
    ids=lambda e: e["regarding"]["name"],
)
def test_the_event_of_a_pod_is_byte_for_byte_what_a_kubelet_wrote(recorded: dict[str, Any]) -> None:
    # That kubelet's threshold was pid.available 5% of 23167 PIDs.
    available = int(re.findall(r"available: (\d+)", recorded["note"])[0])
    written = messages.eviction_text(
        PodView(pod(Container("c")), usage(ContainerUsage("id", "c", MI, 1700))),
        verdict=met(Signal.PID, Amount(None, 5.0, "5%"), resolved=1158),
        observation=observed(Signal.PID, available),
    )
    assert written == (recorded["note"], recorded["annotations"])


# --- containers that use above their request --------------------------------------------------------------------------


def test_the_message_lists_every_container_over_its_request_in_the_order_of_usage() -> None:
    view = PodView(
        pod(
            Container("setup", ContainerKind.INIT, Resources(memory=MI)),
            Container("proxy", ContainerKind.SIDECAR, Resources(memory=64 * MI)),
            Container("app", requests=Resources(memory=128 * MI)),
        ),
        usage(
            ContainerUsage("1", "app", 200 * MI, None),
            ContainerUsage("2", "proxy", 64 * MI, None),
            ContainerUsage("3", "setup", 2 * MI, None),
            ContainerUsage("4", "debugger", 900 * MI, None),
        ),
    )
    written = memory_eviction(view)
    assert written.message == (
        "The node was low on resource: memory. Threshold quantity: 300Mi, available: 174488Ki. "
        "Container app was using 200Mi, request is 128Mi, has larger consumption of memory. "
        "Container setup was using 2Mi, request is 1Mi, has larger consumption of memory. "
    )
    assert written.annotations == {
        "offending_containers": "app,setup",
        "offending_containers_usage": "200Mi,2Mi",
        "starved_resource": "memory",
    }


def test_a_container_known_only_by_its_id_has_its_name_from_the_spec() -> None:
    view = PodView(pod(Container("app", container_id="abc")), usage(ContainerUsage("abc", None, MI, None)))
    assert "Container app was using 1Mi, request is 0, has larger" in memory_eviction(view).message


def test_during_a_resize_the_allocated_request_counts() -> None:
    resized = Container("app", requests=Resources(memory=512 * MI), allocated=Resources(memory=128 * MI))
    view = PodView(pod(resized), usage(ContainerUsage("1", "app", 200 * MI, None)))
    assert "request is 128Mi" in memory_eviction(view).message


def test_a_pods_own_memory_request_is_in_the_message_with_its_usage() -> None:
    view = PodView(
        pod(Container("app"), pod_requests=Resources(memory=256 * MI)),
        usage(ContainerUsage("1", "app", 100 * MI, None), working_set=101 * MI),
    )
    written = memory_eviction(view)
    assert written.message.endswith(
        "Pod web-0 was using 101Mi, request is 256Mi, has larger consumption of memory. "
        "Container app was using 100Mi, request is 0, has larger consumption of memory. "
    )
    assert written.annotations["offending_pod"] == "web-0"
    assert written.annotations["offending_pod_usage"] == "101Mi"


def test_a_pods_own_request_is_not_in_the_message_for_other_resources() -> None:
    view = PodView(pod(Container("app"), pod_requests=Resources(cpu_milli=100)), usage(working_set=101 * MI))
    assert "Pod web-0" not in memory_eviction(view).message
    disk = messages.eviction_text(
        PodView(pod(Container("app"), pod_requests=Resources(memory=1)), usage(working_set=5)),
        verdict=met(Signal.NODEFS, Amount(None, 10.0, "10%"), resolved=MI),
        observation=observed(Signal.NODEFS, KI),
    )
    assert "offending_pod" not in disk.annotations


def test_disk_usage_of_a_container_needs_both_its_writable_layer_and_its_logs() -> None:
    def written(disk: DiskUsage) -> messages.EvictionText:
        view = PodView(
            pod(Container("app", requests=Resources(ephemeral_storage=10 * MI))),
            usage(ContainerUsage("1", "app", None, None, disk)),
        )
        value = Amount(None, 10.0, "10%")
        return messages.eviction_text(
            view, verdict=met(Signal.IMAGEFS, value, resolved=5 * MI), observation=observed(Signal.IMAGEFS, 4 * MI)
        )

    assert written(DiskUsage(rootfs_bytes=8 * MI, logs_bytes=3 * MI)).message == (
        "The node was low on resource: ephemeral-storage. Threshold quantity: 5Mi, available: 4Mi. "
        "Container app was using 11Mi, request is 10Mi, has larger consumption of ephemeral-storage. "
    )
    assert "Container" not in written(DiskUsage(rootfs_bytes=80 * MI)).message
    assert "Container" not in written(DiskUsage(rootfs_bytes=7 * MI, logs_bytes=3 * MI)).message


def test_a_message_about_inodes_lists_no_container() -> None:
    view = PodView(pod(Container("app")), usage(ContainerUsage("1", "app", MI, None, DiskUsage(MI, 9, MI, 9))))
    written = messages.eviction_text(
        view,
        verdict=met(Signal.NODEFS_INODES, Amount(20000, None, "20k"), resolved=20000),
        observation=observed(Signal.NODEFS_INODES, 15000),
    )
    assert written.message == "The node was low on resource: inodes. Threshold quantity: 20k, available: 15k. "
    assert written.annotations == {
        "offending_containers": "",
        "offending_containers_usage": "",
        "starved_resource": "inodes",
    }


def test_a_pod_without_stats_has_the_base_message_and_no_annotations() -> None:
    written = memory_eviction(PodView(pod(Container("app")), None))
    assert written == ("The node was low on resource: memory. Threshold quantity: 300Mi, available: 174488Ki. ", {})


def test_a_message_without_an_observation_has_no_quantities() -> None:
    written = messages.eviction_text(
        PodView(pod(), None),
        verdict=met(Signal.MEMORY, Amount(1, None, "1"), resolved=1),
        observation=observed(Signal.MEMORY, None),
    )
    assert written.message == "The node was low on resource: memory. "


def test_messages_of_storage_limits_contain_the_limit() -> None:
    assert (
        messages.empty_dir_over_limit("cache", limit=100 * MI)
        == 'Usage of EmptyDir volume "cache" exceeds the limit "100Mi". '
    )
    assert (
        messages.pod_over_storage_limit(limit=1536 * MI)
        == "Pod ephemeral local storage usage exceeds the total limit of containers 1536Mi. "
    )
    assert (
        messages.container_over_storage_limit("app", limit=10**9)
        == 'Container app exceeded its local ephemeral storage limit "1G". '
    )


# --- quantities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "quantity", "canonical"),
    [
        ("1.5Gi", 1536 * MI, "1536Mi"),
        ("1024Mi", 1 << 30, "1Gi"),
        ("1000Mi", 1000 * MI, "1000Mi"),
        ("500M", 500_000_000, "500M"),
        ("1500M", 1_500_000_000, "1500M"),
        ("1.5G", 1_500_000_000, "1500M"),
        ("104857600", 104_857_600, "104857600"),
        ("1000", 1000, "1k"),
        ("1024", 1024, "1024"),
        ("20k", 20_000, "20k"),
        ("1e3", 1000, "1e3"),
        ("12E6", 12_000_000, "12e6"),
        ("100e0", 100, "100"),
        ("1E", 10**18, "1E"),
        ("0.5Ki", 512, "512"),
        ("0.1Gi", 107_374_183, "107374183"),
        ("1.5", 2, "1500m"),
    ],
)
def test_a_configured_quantity_is_written_in_the_canonical_form_of_its_own_format(
    text: str, quantity: int, canonical: str
) -> None:
    assert messages.threshold_quantity(Amount(quantity, None, text), value=quantity) == canonical


def test_a_percentage_is_written_as_the_computed_quantity() -> None:
    assert messages.threshold_quantity(Amount(None, 10.0, "10%"), value=858993459) == "858993459"
    assert messages.threshold_quantity(Amount(None, 25.0, "25%"), value=2 << 30) == "2Gi"


@pytest.mark.parametrize(
    ("signal", "available", "text"),
    [
        (Signal.MEMORY, 316116 * KI, "316116Ki"),
        (Signal.ALLOCATABLE_MEMORY, 0, "0"),
        (Signal.NODEFS, 1023, "1023"),
        (Signal.IMAGEFS_INODES, 65536, "65536"),
        (Signal.CONTAINERFS_INODES, 15000, "15k"),
        (Signal.PID, -5, "-5"),
        (Signal.PID, 2000, "2k"),
    ],
)
def test_bytes_are_written_in_binary_units_and_counts_in_decimal_ones(
    signal: Signal, available: int, text: str
) -> None:
    assert messages.available_quantity(observed(signal, available)) == text


# --- our conditions ---------------------------------------------------------------------------------------------------


def test_the_message_of_a_condition_that_minimum_reclaim_keeps_true_names_it() -> None:
    verdict = SignalVerdict(
        observed(Signal.MEMORY, 310 * MI),
        SignalState.HARD,
        (met(Signal.MEMORY, Amount(300 * MI, None, "300Mi"), resolved=300 * MI),),
    )
    assert (
        messages.condition_message(ConditionStatus.TRUE, [verdict])
        == "memory.available is 310Mi, minimum reclaim not reached above 300Mi (hard)"
    )


def test_the_agents_reasons_differ_from_the_kubelets() -> None:
    assert len(set(messages.CONDITION_REASONS.values())) == 9
    for reason in messages.CONDITION_REASONS.values():
        assert re.fullmatch(r"NodeAgent[A-Za-z]+", reason)


def test_a_threshold_that_was_raised_is_quoted_with_its_effective_value() -> None:
    """`1500m` is how a kubelet quotes a configured 1.5; a raised one has another value."""
    assert messages.threshold_quantity(Amount(2, None, "1.5"), value=2) == "1500m"
    assert messages.threshold_quantity(Amount(2, None, "1.5"), value=750 << 20) == "786432k"
    assert messages.threshold_quantity(Amount(200 << 20, None, "200Mi"), value=750 << 20) == "750Mi"
