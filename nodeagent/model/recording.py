"""A recording: the samples that a node's agent took, as they are stored, shown, replayed and tuned with."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model.plan import ConditionVerdict, SignalVerdict
from nodeagent.model.signals import Threshold
from nodeagent.model.snapshot import NodeSnapshot


class RecordingHeader(NamedTuple):
    """The facts that do not change from sample to sample. A recording has one for each process that wrote it, and for
    each configuration that this process had."""

    node: str
    version: str
    """Of the agent that recorded."""
    instance: str
    """The first part of the plan ids of that process."""
    boot_id: str
    """Times on CLOCK_BOOTTIME are comparable within one boot only; compare `wall_time` across boots."""
    began_wall: float
    """When that process began to record with this configuration, epoch seconds. Earlier versions: when it began."""
    configuration: str = ""
    """The configuration as YAML without secrets; empty if it was not recorded."""
    kernel: str = ""
    """`uname -r` and the machine type."""
    kubelet: tuple[Threshold, ...] = ()
    """The kubelet's own thresholds, as far as they were known."""
    facts: Mapping[str, str] = {}
    """Further facts for people, by name: Python, total memory, cgroup version."""


FIRST_SLACK_S: Final = 1.0
"""The first header begins with the first sample, whose time may be a moment after that of its decision."""


def header_at(headers: Sequence[RecordingHeader], wall: float | None) -> RecordingHeader | None:
    """Of headers in the order of time the one in force then (None: the last one); None if none had begun: that of then
    is no longer recorded."""
    begun = [each for each in headers if wall is None or each.began_wall <= wall]
    if begun:
        return begun[-1]
    return next((each for each in headers[:1] if wall is not None and each.began_wall <= wall + FIRST_SLACK_S), None)


class RecordedSample(NamedTuple):
    """One sample of a recording and what the agent concluded from it."""

    snapshot: NodeSnapshot
    """As the decision read it. The usage of small pods may be as old as the recorder's limit for them."""
    signals: tuple[SignalVerdict, ...] = ()
    """Empty in a recording that was imported from elsewhere."""
    conditions: tuple[ConditionVerdict, ...] = ()
    plan_id: str = ""
    """The decision that was made on this sample; empty if it neither acted nor refused."""
    zombies: int | None = None
    """Processes of the node in state Z. None: not counted."""
    exact: bool = False
    """The sample is the whole input of its decision: the policy decides the same on it again."""
    dropped: int = 0
    """Samples before this one that the recorder took and could not store."""

    @property
    def wall_time(self) -> float:
        return self.snapshot.wall_time

    @property
    def at(self) -> float:
        """CLOCK_BOOTTIME."""
        return self.snapshot.taken_at
