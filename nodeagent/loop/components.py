"""What the loop works with: components that a new configuration replaces, and a runtime that lasts as long as the
process."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.oom_scores import OomScores
from nodeagent.actuators.reclaim_runner import ReclaimRunner
from nodeagent.actuators.session import Session
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.load import LoadedConfig
from nodeagent.config.schema import Config
from nodeagent.loop.auto_snapshots import AutoSnapshots
from nodeagent.loop.kubelet_watch import KubeletWatch
from nodeagent.loop.node_profiles import NodeProfiles
from nodeagent.loop.state_store import OomState
from nodeagent.model import Note, ZombieCount
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.sample_recorder import SampleRecorder
from nodeagent.records.state_file import StateFile
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.runtime.sd_notify import Notifier
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.events.fork_meter import ForkMeter
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.node.oom_sources import OomSources
from nodeagent.sampling.sampler import Sampler

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class Components(NamedTuple):
    """What is made from a configuration, and made again from a new one."""

    loaded: LoadedConfig
    sampler: Sampler
    session: Session
    disks: DiskMonitor
    missing: tuple[Note, ...] = ()
    """Programs and writable directories that the configuration needs and this machine does not have."""

    @property
    def config(self) -> Config:
        return self.loaded.config


class Runtime(NamedTuple):
    """What lasts as long as the process, whatever the configuration."""

    file: ConfigFile
    wakeup_sources: WakeupSources
    brakes: ActiveBrakes
    oom_scores: OomScores
    reclaim_runner: ReclaimRunner
    hook_runner: ReclaimRunner
    """Of hooks, apart from reclaim actions: neither takes the other's threads."""
    forks: ForkMeter
    other_oom_handlers: Callable[[], tuple[Note, ...]]
    """Notes on other programs that kill on this node."""
    zombies: Callable[[], ZombieCount | None]
    """The processes that their parents have not waited for; None: not counted."""
    count_zombies_soon: Callable[[], None]
    """PIDs are short: have them counted."""
    kubelet: KubeletWatch
    profiles: NodeProfiles
    store: StateFile | None
    """None for an agent that stores nothing."""
    recorder: FlightRecorder | None
    """None without a state directory."""
    oom_sources: OomSources
    startup_notes: tuple[Note, ...]
    log: "FilteringBoundLogger"
    lines_dropped: Callable[[], int]
    """Log lines that were dropped."""
    notifier: Notifier
    boottime: Callable[[], float]
    lock: AgentLock | None = None
    """None for an agent that sends and stores nothing."""
    standby: bool = False
    """Another agent acts on this node. This one only decides, until it may take over."""
    restorable_until: float = float("-inf")
    """See `state_store.recall`."""
    oom_state: OomState | None = None
    """The counters of OOM kills that an earlier process on this boot saw last."""
    sample_recorder: SampleRecorder | None = None
    """None without `recorder.enabled`, and for an agent that stores nothing."""
    auto_snapshots: AutoSnapshots | None = None
    """None without a recording, and without `recorder.snapshots`."""
    own_pod_uid: str = ""
    monotonic: Callable[[], float] = time.monotonic
    """The clock of the process. `boottime` is the host's, and that of a recorded node stands still."""
