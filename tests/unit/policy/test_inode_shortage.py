"""While bytes run out first, a shortage of inodes takes no pod."""

import pytest

from nodeagent.config.schema import Config, RankingConfig
from nodeagent.model import DiskUsage, DiskUsageQuality, Plan, PodView, RefusalCode, Signal, SignalState, Threshold
from nodeagent.policy import engine
from nodeagent.policy.state import initial
from tests.support import nodes
from tests.support.nodes import GI, KI, MI, NOW, config, hard, snapshot, soft

Available = dict[Signal, int | None]

# What statvfs of an xfs of 4 GiB with 100,023 inodes in use returned when a file had filled all but 0.1%. With 10% of
# the bytes left it was 825,823 of 925,848 inodes: xfs makes inodes out of free blocks.
XFS: Available = {Signal.NODEFS: 4 * MI, Signal.NODEFS_INODES: 8_327}
BYTES, INODES = hard(Signal.NODEFS, 400 * MI), hard(Signal.NODEFS_INODES, 10_835)


def holder(name: str, *, size: int, inodes: int) -> PodView:
    usage = {
        "disk": DiskUsage(volumes_bytes=size, volumes_inodes=inodes),
        "disk_usage_quality": DiskUsageQuality(NOW, complete=True),
    }
    return nodes.view(name, usage_more=usage)


FILLER = holder("filler", size=3 * GI, inodes=2)
MANY_FILES = holder("many-files", size=400 * KI, inodes=100_020)


def two_plans(left: Available, settings: Config) -> tuple[Plan, Plan]:
    """The plans of two samples with this much left: in the second, the victims of the first are terminating."""
    began, at = NOW - 10.0, NOW
    _, state = engine.decide(snapshot(at=began, available=left), initial("t", now=began), now=began, config=settings)
    first, state = engine.decide(snapshot(FILLER, MANY_FILES, available=left), state, now=at, config=settings)
    node = snapshot(FILLER, MANY_FILES, at=at + 1.0, available=left)
    second, _ = engine.decide(node, state, now=at + 1.0, config=settings)
    return first, second


def victims(*plans: Plan) -> list[str | None]:
    return [victim.pod.name for plan in plans for victim in plan.victims]


def test_a_pod_with_many_files_is_not_evicted_for_one_that_fills_an_xfs() -> None:
    first, second = two_plans(XFS, config(BYTES, INODES))
    assert victims(first, second) == ["filler"]
    verdict = next(each for each in second.signals if each.signal is Signal.NODEFS_INODES)
    assert verdict.state is SignalState.HARD, "the condition stays: a kubelet with this threshold has it as well"
    assert (verdict.thresholds[0].met, verdict.thresholds[0].due) == (True, False)
    refusal = next(each for each in second.refusals if each.code is RefusalCode.BYTES_FIRST)
    assert refusal.message == (
        "nodefs.inodesFree: 8327 are left for 4Mi of free space, one for each block of 4Ki and more: bytes run out "
        "first, and nodefs.available is below a threshold"
    )


@pytest.mark.parametrize(
    ("left", "thresholds", "expected"),
    [
        pytest.param(XFS, (INODES,), ["many-files"], id="no threshold of bytes"),
        pytest.param(XFS, (soft(Signal.NODEFS, 400 * MI), INODES), ["many-files", "filler"], id="bytes are soft"),
        pytest.param(XFS, (hard(Signal.NODEFS, 3 * MI), INODES), ["many-files"], id="enough bytes"),
        pytest.param(XFS | {Signal.NODEFS: 300 * MI}, (BYTES, INODES), ["filler", "many-files"], id="inodes end first"),
        pytest.param({Signal.NODEFS: 0, Signal.NODEFS_INODES: 0}, (BYTES, INODES), ["filler"], id="nothing is left"),
        pytest.param(
            XFS, (soft(Signal.NODEFS, 400 * MI), soft(Signal.NODEFS_INODES, 10_835)), ["filler"], id="both soft"
        ),
    ],
)
def test_inodes_wait_only_for_bytes_that_run_out_first(
    left: Available, thresholds: tuple[Threshold, ...], expected: list[str]
) -> None:
    first, second = two_plans(left, config(*thresholds))
    assert victims(first, second) == expected


def test_the_grace_of_a_soft_threshold_of_inodes_does_not_end_before_that_of_bytes() -> None:
    settings = config(soft(Signal.NODEFS, 400 * MI, grace_s=60.0), soft(Signal.NODEFS_INODES, 10_835))
    assert victims(*two_plans(XFS, settings)) == []


def test_the_kubelets_order_evicts_for_inodes_as_a_kubelet_does() -> None:
    settings = config(INODES, BYTES, ranking=RankingConfig(kubelet=True))
    _, second = two_plans(XFS, settings)
    assert RefusalCode.BYTES_FIRST not in {refusal.code for refusal in second.refusals}
