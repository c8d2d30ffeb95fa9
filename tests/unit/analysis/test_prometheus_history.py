"""The history of a node in a real Prometheus becomes the samples of a recording."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.analysis import prometheus_history
from nodeagent.analysis.prometheus_client import PrometheusClient, PrometheusError, Server
from nodeagent.analysis.prometheus_history import PrometheusHistory, Wanted
from nodeagent.analysis.simulation import Simulator
from nodeagent.model import DiskLayout, NodeSnapshot, QOSClass, Signal
from tests.support.nodes import GI, MI, config, hard
from tests.support.prometheus_server import NodeSeries, needs_prometheus, running_prometheus

START = 1_763_000_000.0
STEP_S = 15.0
COUNT = 480
TOTAL = 8 * GI
LEAK = "11111111-2222-3333-4444-555555555555"
WEB = "99999999-2222-3333-4444-555555555555"


def hog(number: int) -> float:
    """Grows for an hour to 6 GiB and is then killed."""
    return 100 * MI + number * 25 * MI if number < 240 else 100 * MI


def booted(number: int) -> float | None:
    """Begins after the other series, and has a gap longer than the lookback."""
    return START - 5000 if 3 <= number < 100 or number >= 200 else None


def write_series(path: Path) -> None:
    series = NodeSeries("node-1", start=START, step_s=STEP_S, count=COUNT)
    series.add("node_uname_info", lambda _: 1, nodename="node-1", release="6.12.0")
    series.add("node_memory_MemTotal_bytes", lambda n: None if 100 <= n < 110 else TOTAL)
    series.add("node_memory_MemAvailable_bytes", lambda n: TOTAL - GI - hog(n))
    series.add("node_boot_time_seconds", booted)
    for mount, device in (("/", "/dev/sda1"), ("/var/lib/containerd", "/dev/sdb1"), ("/boot", "/dev/sda2")):
        labels = {"mountpoint": mount, "device": device, "fstype": "ext4"}
        series.add("node_filesystem_size_bytes", lambda _: 100 * GI, **labels)
        series.add("node_filesystem_avail_bytes", lambda n: 50 * GI - n * MI, **labels)
        series.add("node_filesystem_files", lambda _: 1_000_000, **labels)
        series.add("node_filesystem_files_free", lambda _: 900_000, **labels)
    series.add("container_memory_working_set_bytes", lambda n: GI + hog(n), of="cadvisor", id="/")
    series.add("container_memory_working_set_bytes", lambda n: 200 * MI + hog(n), of="cadvisor", id="/kubepods.slice")
    series.add("container_spec_memory_limit_bytes", lambda _: 7 * GI, of="cadvisor", id="/kubepods.slice")
    series.add_pod("shop", "leak-5d4f7c9b8d-abcde", LEAK, hog)
    series.add_pod("shop", "web-0", WEB, lambda n: 100 * MI if n > 50 else None)
    series.write(path)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("prometheus")
    write_series(directory / "node.om")
    with running_prometheus(directory, directory / "node.om") as found:
        yield found


def history(address: str, *, node: str = "node-1", start: float = START, part_steps: int = 2000) -> PrometheusHistory:
    wanted = Wanted(node, start, STEP_S, COUNT)
    return PrometheusHistory(PrometheusClient(Server(address)), wanted, part_steps=part_steps)


def read(found: PrometheusHistory) -> list[NodeSnapshot]:
    return [sample.snapshot for sample in found.samples()]


@needs_prometheus
def test_every_step_with_values_is_one_sample_with_the_node_its_disks_and_its_pods(address: str) -> None:
    samples = read(history(address))
    # The lookback of five minutes fills the gap of ten steps.
    assert len(samples) == COUNT
    first, later = samples[0], samples[200]
    assert first.wall_time == START
    assert first.taken_at == 5000.0
    assert first.observations[Signal.MEMORY].available == TOTAL - GI - hog(0)
    assert first.mem_available.available == TOTAL - GI - hog(0)
    assert first.observations[Signal.ALLOCATABLE_MEMORY].available == 7 * GI - 200 * MI - hog(0)
    assert first.observations[Signal.NODEFS].available == 50 * GI
    assert first.observations[Signal.IMAGEFS_INODES].available == 900_000
    assert first.layout is DiskLayout.DEDICATED_IMAGEFS
    assert [view.pod.key for view in first.pods] == ["shop/leak-5d4f7c9b8d-abcde"]
    leak, web = later.pods
    assert (leak.pod.uid, leak.pod.qos_class) == (LEAK, QOSClass.BURSTABLE)
    assert leak.pod.owner is not None
    assert leak.pod.owner.name == "leak"
    assert leak.usage is not None
    assert leak.usage.memory_working_set == hog(200)
    assert leak.usage.memory_unreclaimable == hog(200)
    assert web.pod.key == "shop/web-0"


@needs_prometheus
def test_steps_without_a_boot_time_are_of_the_same_boot(address: str) -> None:
    for found in (history(address), history(address, part_steps=110)):
        assert {sample.wall_time - sample.taken_at for sample in read(found)} == {START - 5000}


@needs_prometheus
def test_what_the_series_lack_is_unknown_and_named(address: str) -> None:
    found = history(address)
    samples = read(found)
    assert samples[0].observations[Signal.PID].available is None
    assert [text for text in found.remarks if "node_processes_threads" in text and "pid.available is unknown" in text]
    assert not [text for text in found.remarks if "MemAvailable" in text]
    assert set(prometheus_history.ASSUMED) <= set(found.remarks)


@needs_prometheus
def test_the_policy_runs_over_the_history(address: str) -> None:
    simulator = Simulator(config(hard(value=2 * GI)))
    for snapshot in read(history(address)):
        simulator.feed(snapshot)
    [eviction] = simulator.result().evictions
    assert eviction.pod == "shop/leak-5d4f7c9b8d-abcde"
    assert eviction.wall_time == START + STEP_S * next(n for n in range(COUNT) if TOTAL - GI - hog(n) < 2 * GI)


@needs_prometheus
def test_a_long_time_is_read_in_parts(address: str) -> None:
    whole = read(history(address))
    parts: list[int] = []
    found = history(address, part_steps=100)
    samples = [sample.snapshot for sample in found.samples(progress=lambda done, _: parts.append(done))]
    assert parts == [100, 200, 300, 400, 480]
    assert samples == whole


@needs_prometheus
def test_an_unknown_node_is_answered_with_the_known_ones(address: str) -> None:
    with pytest.raises(PrometheusError, match=r"for the node other; it has node-1:9100"):
        history(address, node="other")


@needs_prometheus
def test_a_time_without_series_is_an_error(address: str) -> None:
    with pytest.raises(PrometheusError, match="no node_memory_MemTotal_bytes at all"):
        history(address, start=START - 10 * 86400)


@needs_prometheus
def test_the_errors_of_a_prometheus_are_shown_as_it_gives_them(address: str) -> None:
    client = PrometheusClient(Server(address))
    with pytest.raises(PrometheusError, match=r"HTTP 400, bad_data: .*parse error: unclosed left parenthesis"):
        client.query_range("sum(", start=START, step_s=15.0, count=10)
    with pytest.raises(PrometheusError, match=r"HTTP 400, bad_data: exceeded maximum resolution of 11,000 points"):
        client.query_range("up", start=START, step_s=1.0, count=20_000)
    with pytest.raises(PrometheusError, match=r"HTTP 404, and the answer is not one of a Prometheus API"):
        PrometheusClient(Server(f"{address}/elsewhere")).series("up", start=START, end=START + 10)
