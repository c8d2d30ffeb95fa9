"""Compute how much of a signal may still be used before a threshold is met."""

from nodeagent.model import NodeSnapshot, SignalVerdict, Threshold, ThresholdVerdict


def available_amount(snapshot: NodeSnapshot, threshold: Threshold) -> int | None:
    """The available amount that the threshold is compared with; for memory it depends on the memory model."""
    return snapshot.observe(threshold.signal, threshold.memory_model).available


def threshold_headroom(snapshot: NodeSnapshot, verdict: ThresholdVerdict) -> int | None:
    """Available amount minus threshold value: negative below the threshold, None if either is unknown."""
    amount = available_amount(snapshot, verdict.threshold)
    return None if amount is None or verdict.value is None else amount - verdict.value


def leading_threshold(snapshot: NodeSnapshot, verdict: SignalVerdict) -> ThresholdVerdict | None:
    """The threshold that determines the signal's state: a hard one that is met, else a soft one that is met, else the
    one with the least headroom. None if no headroom is known."""
    known = [
        ((not (each.met and each.threshold.hard), not each.met, left), each)
        for each in verdict.thresholds
        if (left := threshold_headroom(snapshot, each)) is not None
    ]
    return min(known, key=lambda pair: pair[0])[1] if known else None
