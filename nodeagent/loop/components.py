"""What the loop is put together from: parts that a new configuration replaces, and means that last as long as the
process."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.reclaim_runner import ReclaimRunner
from nodeagent.actuators.session import Session
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.load import LoadedConfig
from nodeagent.config.schema import Config
from nodeagent.model import Note
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.state_file import StateFile
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.runtime.sd_notify import Notifier
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.events.fork_meter import ForkMeter
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.sampler import Sampler

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class Components(NamedTuple):
    """What a configuration makes, and a new one makes anew."""

    loaded: LoadedConfig
    sampler: Sampler
    session: Session
    disks: DiskMonitor
    missing: tuple[Note, ...] = ()
    """Programs that the configuration names and this machine does not have."""

    @property
    def config(self) -> Config:
        return self.loaded.config


class Runtime(NamedTuple):
    """What the process has to work with, whatever its configuration is."""

    file: ConfigFile
    wakeup_sources: WakeupSources
    brakes: ActiveBrakes
    reclaim_runner: ReclaimRunner
    forks: ForkMeter
    other_oom_handlers: Callable[[], tuple[Note, ...]]
    """Who else kills on this node."""
    store: StateFile | None
    """None for an agent that keeps nothing."""
    recorder: FlightRecorder | None
    """None where there is no directory to write to."""
    startup_notes: tuple[Note, ...]
    """What was found at the start that the reader should know."""
    log: "FilteringBoundLogger"
    lines_dropped: Callable[[], int]
    """Of the log."""
    notifier: Notifier
    boottime: Callable[[], float]
    lock: AgentLock | None = None
    """None where nothing is ever sent nor kept."""
    standby: bool = False
    """Another agent acts on this node: this one only watches, until it may take its place."""
    restorable_until: float = float("-inf")
    """See `keeper.recall`."""
    own_pod_uid: str = ""
    monotonic: Callable[[], float] = time.monotonic
    """The process' own time: `boottime` is the host's, and that of a recording stands still."""
