"""The worker that reclaims page cache, against control files in a temporary directory. The kernel itself is the subject
of tests/vm/test_page_cache.py."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.actuators import page_cache
from nodeagent.actuators.reclaim_runner import JobResult
from nodeagent.model import ReclaimOrder, ReclaimResult, ReclaimTarget, Signal, Tier

MIB = 1 << 20
PATIENCE_S = 20.0


class Pods:
    """Control files of pods. Each `memory.reclaim` is a FIFO; what is written to it is taken from the pod's usage as
    soon as the figure is read, which the job does after each step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.written: list[tuple[str, str]] = []
        """(pod, what was written), in order."""
        self.available = 300 * MIB
        self.figure_reads = 0
        self.stalls: dict[str, int] = {}
        """Microseconds that a pod stalls between two reads of the figure."""
        self.swaps: dict[str, int] = {}
        """Bytes by which its swap grows meanwhile."""
        self._fifos: dict[str, int] = {}
        (directory / "meminfo").write_text("MemTotal: 1 kB\nSwapFree: 0 kB\n")

    def add(self, name: str, *, usage: int) -> None:
        pod = self.directory / name
        pod.mkdir()
        (pod / "memory.current").write_text(f"{usage}\n")
        (pod / "memory.stat").write_text("active_file 0\ninactive_file 0\n")
        (pod / "memory.swap.current").write_text("0\n")
        (pod / "memory.pressure").write_text(self._psi(7000))
        os.mkfifo(pod / "memory.reclaim")
        self._fifos[name] = os.open(pod / "memory.reclaim", os.O_RDWR | os.O_NONBLOCK)

    def usage(self, name: str) -> int:
        return int((self.directory / name / "memory.current").read_text())

    def amounts(self, name: str) -> list[int]:
        return [int(text.split()[0]) for pod, text in self.written if pod == name]

    def figure(self) -> int | None:
        self.figure_reads += 1
        for name, stall_us in self.stalls.items():
            (self.directory / name / "memory.pressure").write_text(self._psi(7000 + stall_us * self.figure_reads))
        for name, grown in self.swaps.items():
            (self.directory / name / "memory.swap.current").write_text(f"{grown * self.figure_reads}\n")
        for name, fifo in self._fifos.items():
            try:
                text = os.read(fifo, 100).decode()
            except BlockingIOError:
                continue
            self.written.append((name, text))
            amount = int(text.split()[0])
            pod = self.directory / name
            (pod / "memory.current").write_text(f"{self.usage(name) - amount}\n")
            self.available += amount
        return self.available

    def close(self) -> None:
        for fifo in self._fifos.values():
            os.close(fifo)

    @staticmethod
    def _psi(total_us: int) -> str:
        return "".join(f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={total_us}\n" for kind in ("some", "full"))

    def run(
        self, *targets: ReclaimTarget, level: int | None = 1000 * MIB, timeout_s: float = PATIENCE_S, stop: bool = False
    ) -> JobResult:
        order = ReclaimOrder(
            "pageCache", Signal.MEMORY, Tier.HARD, 0, self.available, 0.0, level=level, targets=targets
        )
        paths = page_cache.Paths(self.directory, self.directory / "meminfo")
        job = page_cache.build_job(order, paths, figure=self.figure, stop=lambda: stop)
        result = job(time.monotonic() + timeout_s)
        self.figure()  # what was written last
        return result


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    yield made
    made.close()


def target(name: str, amount: int, *, keep: int = 0) -> ReclaimTarget:
    return ReclaimTarget(f"shop/{name}", f"/{name}", amount, keep)


def test_pods_are_reclaimed_in_the_order_given_until_the_level_is_reached(pods: Pods) -> None:
    for name in ("first", "second", "third"):
        pods.add(name, usage=500 * MIB)
    result = pods.run(
        target("first", 200 * MIB), target("second", 200 * MIB), target("third", 200 * MIB), level=540 * MIB
    )
    assert sum(pods.amounts("first")) == 200 * MIB
    assert 40 * MIB <= sum(pods.amounts("second")) < 40 * MIB + page_cache.MAX_STEP
    assert pods.amounts("third") == []
    assert [pod for pod, _ in pods.written] == sorted(pod for pod, _ in pods.written), "one after another"
    assert result.result is ReclaimResult.DONE
    assert result.reclaimed == sum(pods.amounts("first") + pods.amounts("second"))
    assert "shop/first 200Mi, shop/second " in result.message
    assert "the reclaim ends at 540Mi" in result.message


def test_steps_are_16_to_64_mib_and_leave_anonymous_memory(pods: Pods) -> None:
    pods.add("pod", usage=900 * MIB)
    pods.run(target("pod", 800 * MIB), level=2000 * MIB)
    amounts = pods.amounts("pod")
    assert sum(amounts) == 800 * MIB
    assert amounts[0] == page_cache.MIN_STEP
    assert all(page_cache.MIN_STEP <= amount <= page_cache.MAX_STEP for amount in amounts[:-1])
    assert all(text.endswith(" swappiness=0") for _, text in pods.written)


def test_without_a_level_in_reach_the_job_ends_with_the_amounts(pods: Pods) -> None:
    pods.add("pod", usage=900 * MIB)
    result = pods.run(target("pod", 100 * MIB))
    assert (result.result, result.reclaimed) == (ReclaimResult.STOPPED, 100 * MIB)


@pytest.mark.parametrize(("keep", "left"), [(150, 150), (170, 170), (200, 200), (300, 200)])
def test_a_pod_that_has_shrunk_since_the_decision_keeps_what_the_order_keeps(pods: Pods, keep: int, left: int) -> None:
    pods.add("pod", usage=200 * MIB)
    pods.run(target("pod", 800 * MIB, keep=keep * MIB))
    assert left * MIB <= pods.usage("pod") < left * MIB + page_cache.OVERSHOOT * MIB


def test_a_pod_that_begins_to_stall_is_left_alone_and_the_next_one_follows(pods: Pods) -> None:
    for name in ("stalls", "calm"):
        pods.add(name, usage=900 * MIB)
    pods.stalls = {"stalls": page_cache.STALL_US + 1, "calm": 0}
    result = pods.run(target("stalls", 300 * MIB), target("calm", 300 * MIB))
    assert pods.amounts("stalls") == [page_cache.MIN_STEP]
    assert sum(pods.amounts("calm")) == 300 * MIB
    assert "shop/stalls 16Mi (it stalled 1.0ms)" in result.message


def test_stalls_below_the_mark_end_nothing(pods: Pods) -> None:
    pods.add("pod", usage=900 * MIB)
    pods.stalls = {"pod": 10}
    pods.run(target("pod", 300 * MIB))
    assert sum(pods.amounts("pod")) == 300 * MIB


def test_a_pod_whose_swap_grows_is_left_alone(pods: Pods) -> None:
    pods.add("pod", usage=900 * MIB)
    pods.swaps = {"pod": 4096}
    result = pods.run(target("pod", 300 * MIB))
    assert pods.amounts("pod") == [page_cache.MIN_STEP]
    assert "its swap grew" in result.message


def test_a_level_that_is_reached_already_reclaims_nothing(pods: Pods) -> None:
    pods.add("pod", usage=900 * MIB)
    result = pods.run(target("pod", 800 * MIB), level=300 * MIB)
    assert (result.result, result.reclaimed, pods.written) == (ReclaimResult.DONE, 0, [])


def test_after_its_deadline_the_job_writes_nothing(pods: Pods) -> None:
    pods.add("pod", usage=900 * MIB)
    result = pods.run(target("pod", 800 * MIB), timeout_s=0.0)
    assert (result.result, pods.written) == (ReclaimResult.TIMED_OUT, [])


def test_an_agent_that_stops_ends_the_job(pods: Pods) -> None:
    pods.add("pod", usage=900 * MIB)
    result = pods.run(target("pod", 800 * MIB), stop=True)
    assert (result.result, pods.written) == (ReclaimResult.STOPPED, [])


def test_a_pod_that_is_gone_is_left_out(pods: Pods) -> None:
    pods.add("there", usage=900 * MIB)
    result = pods.run(target("gone", 200 * MIB), target("there", 100 * MIB))
    assert (result.result, result.reclaimed) == (ReclaimResult.STOPPED, 100 * MIB)
    assert "shop/gone 0 (gone), shop/there 100Mi" in result.message


def test_a_path_that_leaves_the_hierarchy_is_never_written(pods: Pods) -> None:
    pods.add("outside", usage=900 * MIB)
    inside = pods.directory / "cgroups"
    inside.mkdir()
    order = ReclaimOrder(
        "pageCache",
        Signal.MEMORY,
        Tier.HARD,
        0,
        0,
        0.0,
        level=1000 * MIB,
        targets=(ReclaimTarget("shop/x", "/../outside", 100 * MIB, 0),),
    )
    job = page_cache.build_job(order, page_cache.Paths(inside, pods.directory / "meminfo"), figure=pods.figure)
    assert job(time.monotonic() + PATIENCE_S).reclaimed == 0
    pods.figure()
    assert pods.written == []


def test_a_kernel_that_refuses_the_write_is_one_failure_with_the_reason(pods: Pods) -> None:
    for name in ("one", "two"):
        pods.add(name, usage=900 * MIB)
    refused = pods.directory / "one" / "memory.reclaim"
    refused.unlink()
    refused.mkdir()  # root may write any file, but no directory
    result = pods.run(target("one", 100 * MIB), target("two", 100 * MIB))
    assert (result.result, result.message) == (ReclaimResult.FAILED, f"{refused}: Is a directory")
    assert pods.amounts("two") == []


def test_a_signal_that_cannot_be_read_ends_the_job(pods: Pods) -> None:
    pods.add("pod", usage=900 * MIB)
    order = ReclaimOrder(
        "pageCache", Signal.MEMORY, Tier.HARD, 0, 0, 0.0, level=1000 * MIB, targets=(target("pod", 100 * MIB),)
    )
    paths = page_cache.Paths(pods.directory, pods.directory / "meminfo")
    result = page_cache.build_job(order, paths, figure=lambda: None)(time.monotonic() + PATIENCE_S)
    pods.figure()
    assert (result.result, pods.written) == (ReclaimResult.STOPPED, [])
