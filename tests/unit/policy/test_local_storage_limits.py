import pytest

from nodeagent.model import (
    Container,
    ContainerKind,
    ContainerUsage,
    DiskLayout,
    DiskUsage,
    DiskUsageQuality,
    EmptyDir,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    Resources,
    VolumeUsage,
)
from nodeagent.policy.local_storage_limits import StorageLimit, Violation, violations

MI = 1 << 20
SINGLE = DiskLayout.SINGLE


def limited(amount: int | None, name: str = "c", kind: ContainerKind = ContainerKind.REGULAR) -> Container:
    return Container(name, kind, limits=Resources(ephemeral_storage=amount))


def view(
    *containers: Container,
    disk: DiskUsage = DiskUsage(),  # noqa: B008 - immutable
    used: dict[str, DiskUsage] | None = None,
    empty_dirs: tuple[EmptyDir, ...] = (),
    volumes: tuple[VolumeUsage, ...] = (),
    overhead: int | None = None,
) -> PodView:
    pod = Pod(
        "u",
        "u",
        "ns",
        "p",
        PodSource.API,
        QOSClass.BURSTABLE,
        containers=containers,
        empty_dirs=empty_dirs,
        overhead=Resources(ephemeral_storage=overhead),
    )
    usage = PodUsage(
        "u",
        QOSClass.BURSTABLE,
        "/p",
        0.0,
        disk=disk,
        volumes=volumes,
        containers=tuple(ContainerUsage(f"id-{name}", name, None, None, each) for name, each in (used or {}).items()),
    )
    return PodView(pod, usage)


def only(checked: PodView, layout: DiskLayout = SINGLE) -> Violation | None:
    found = violations([checked], layout=layout)
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize(("used", "over"), [(99 * MI, False), (100 * MI, False), (101 * MI, True)])
@pytest.mark.parametrize("memory_backed", [False, True])
def test_an_empty_dir_over_its_size_limit_is_a_violation_on_any_medium(
    used: int, over: bool, memory_backed: bool
) -> None:
    checked = view(
        empty_dirs=(EmptyDir("cache", memory_backed, 100 * MI),),
        volumes=(VolumeUsage("cache", used, 1, memory_backed),),
    )
    found = only(checked)
    assert (found is not None) is over
    if found is not None:
        assert (found.limit, found.used, found.allowed) == (StorageLimit.EMPTY_DIR, used, 100 * MI)
        assert found.message == 'Usage of EmptyDir volume "cache" exceeds the limit "100Mi". '


@pytest.mark.parametrize("size_limit", [None, 0])
def test_an_empty_dir_without_a_limit_above_zero_is_free(size_limit: int | None) -> None:
    checked = view(
        empty_dirs=(EmptyDir("cache", False, size_limit),), volumes=(VolumeUsage("cache", 1 << 40, 1, False),)
    )
    assert only(checked) is None


def test_an_empty_dir_that_was_not_measured_is_no_violation() -> None:
    dirs = (EmptyDir("cache", False, 1),)
    assert only(view(empty_dirs=dirs)) is None
    assert only(view(empty_dirs=dirs, volumes=(VolumeUsage("cache", None, None, False),))) is None


@pytest.mark.parametrize(("logs", "over"), [(10, False), (11, True)])
def test_a_pod_is_held_to_the_sum_of_its_containers_limits_with_overhead(logs: int, over: bool) -> None:
    checked = view(
        limited(30, "a"),
        limited(20, "b"),
        overhead=10,
        disk=DiskUsage(rootfs_bytes=20, logs_bytes=logs, volumes_bytes=30),
    )
    found = only(checked)
    assert (found is not None) is over
    if found is not None:
        assert (found.limit, found.used, found.allowed) == (StorageLimit.POD, 61, 60)
        assert found.message == "Pod ephemeral local storage usage exceeds the total limit of containers 60. "


def test_one_limited_container_does_not_cap_its_unlimited_siblings() -> None:
    disk = DiskUsage(rootfs_bytes=500, logs_bytes=0, volumes_bytes=0)
    assert only(view(limited(10, "a"), limited(None, "b"), disk=disk)) is None
    sidecar = limited(None, "b", ContainerKind.SIDECAR)
    assert only(view(limited(10, "a"), sidecar, disk=disk)) is None
    # An init container is over when the others run.
    setup = limited(None, "b", ContainerKind.INIT)
    assert only(view(limited(10, "a"), setup, disk=disk)) is not None


@pytest.mark.parametrize(
    ("layout", "used"), [(SINGLE, 110), (DiskLayout.SPLIT, 110), (DiskLayout.DEDICATED_IMAGEFS, None)]
)
def test_a_container_is_held_to_its_limit_with_its_writable_layer_unless_that_is_elsewhere(
    layout: DiskLayout, used: int | None
) -> None:
    checked = view(
        limited(100, "a"),
        limited(None, "b"),
        used={"a": DiskUsage(rootfs_bytes=60, logs_bytes=50), "b": DiskUsage(900)},
    )
    found = only(checked, layout)
    assert (found.used if found else None) == used
    if found is not None:
        assert (found.limit, found.message) == (
            StorageLimit.CONTAINER,
            'Container a exceeded its local ephemeral storage limit "100". ',
        )


@pytest.mark.parametrize("kind", [ContainerKind.INIT, ContainerKind.SIDECAR])
def test_only_regular_containers_are_held_to_their_own_limit(kind: ContainerKind) -> None:
    used = {"a": DiskUsage(rootfs_bytes=60, logs_bytes=50)}
    assert only(view(limited(100, "a", kind), limited(None, "b"), used=used)) is None


def test_the_first_violation_of_a_pod_wins_and_every_pod_has_its_own() -> None:
    empty_dir = view(
        limited(1),
        disk=DiskUsage(rootfs_bytes=50),
        used={"c": DiskUsage(50, None, 50)},
        empty_dirs=(EmptyDir("cache", False, 1),),
        volumes=(VolumeUsage("cache", 2, 1, False),),
    )
    whole = empty_dir._replace(pod=empty_dir.pod._replace(empty_dirs=()))
    own = view(limited(1), used={"c": DiskUsage(50, None, 50)})
    found = violations([empty_dir, own, whole, view(limited(1)), PodView(own.pod, None)], layout=SINGLE)
    assert [each.limit for each in found] == [StorageLimit.EMPTY_DIR, StorageLimit.CONTAINER, StorageLimit.POD]


def test_etc_hosts_and_the_pods_own_log_files_count_against_the_pods_limit_only() -> None:
    disk = DiskUsage(rootfs_bytes=60 * MI, logs_bytes=20 * MI, volumes_bytes=20 * MI, other_bytes=1)
    found = only(view(limited(100 * MI), disk=disk))
    assert found is not None
    assert (found.limit, found.used) == (StorageLimit.POD, 100 * MI + 1)
    assert only(view(limited(100 * MI), disk=disk._replace(other_bytes=0))) is None


def test_old_numbers_are_no_proof_of_a_violation() -> None:
    over = view(limited(100 * MI), disk=DiskUsage(rootfs_bytes=200 * MI))
    assert over.usage is not None
    seen = over._replace(usage=over.usage._replace(disk_usage_quality=DiskUsageQuality(1000.0, complete=True)))
    assert violations([seen], layout=SINGLE, at=1100.0)
    assert not violations([seen], layout=SINGLE, at=1300.0)
