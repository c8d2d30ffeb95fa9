"""Builds the agent of `nodeagent run`: host, API session, state, and the loop over them. Wiring only."""

import contextlib
import enum
import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nodeagent.actuators import brakes, cluster_session, eviction_hook_jobs, reclaim_runner
from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.cluster_session import ClusterSession
from nodeagent.actuators.conditions import OwnedCondition
from nodeagent.actuators.oom_scores import OomScores
from nodeagent.actuators.reclaim_runner import ReclaimRunner
from nodeagent.actuators.session import NoCluster, Session
from nodeagent.config import above_kubelet, keys, kubelet, load, show
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.load import LoadedConfig
from nodeagent.config.problems import ConfigError, Origin, Problem
from nodeagent.config.schema import Config, Mode, ReclaimKind
from nodeagent.kube import credentials, node_identity
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.loop import auto_snapshots, sample_recording, state_store
from nodeagent.loop.agent import Agent
from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.kubelet_watch import KubeletWatch
from nodeagent.loop.node_profiles import NodeProfiles
from nodeagent.loop.process_scan import ProcessScan
from nodeagent.loop.state_store import AgentState, Recalled
from nodeagent.model import Note, NoteKind
from nodeagent.policy import stall
from nodeagent.policy import state as policy_state
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.state_file import StateFile
from nodeagent.runtime import clock, own_cost, sd_notify, self_protection, selinux, workers
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.events import fork_meter
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.statvfs_timeout import StatvfsWithTimeout
from nodeagent.sampling.node import oom_sources
from nodeagent.sampling.pods import pod_cgroups
from nodeagent.sampling.pods.pod_cgroups import PodCgroup
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.http_server import AddressError
from nodeagent.telemetry.log import LineWriter

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

STATE_FILE: Final = "state"
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What the loop handles: the first two end it, the last reloads the configuration."""
NO_PID_RETRY_S: Final = 1.0
"""Pause between two attempts to start without a PID."""
CONFIRM_S: Final = 60.0
"""How long a session that a reload replaces waits for the answers about its node's identity, without which it can clear
nothing. Each has a deadline of its own."""


class CannotRunKind(enum.StrEnum):
    """What must be changed before the agent can run."""

    CONFIGURATION = "configuration"
    USAGE = "usage"
    """The command line."""


class CannotRunError(Exception):
    """The agent cannot run. The message has the reason and the remedy."""

    def __init__(self, message: str, kind: CannotRunKind = CannotRunKind.CONFIGURATION) -> None:
        super().__init__(message)
        self.kind = kind


def build_agent(
    loaded: LoadedConfig,
    file: ConfigFile,
    host: Host,
    log: "FilteringBoundLogger",
    writer: LineWriter,
    stack: contextlib.ExitStack,
    *,
    lock: AgentLock,
    other: str,
    beside_since: float,
) -> tuple[Agent, Wakeups]:
    """The agent and its wake-ups; `stack` closes what they hold open. `other`: the lock of another agent that acts on
    this node; this one is a dry run and stores nothing. `beside_since`: see `state_store.recall`. Raises
    CannotRunError."""
    config = loaded.config
    if host.recorded and load.may_enforce(loaded):
        raise CannotRunError(f"{host.root} is a recorded node; nothing can be enforced there: use --dry-run")
    identity = node_identity.local_name(given=config.node_name)
    wakeups = stack.enter_context(Wakeups(SIGNALS))
    if other:
        store, recorder = None, None
        state = AgentState(policy_state.initial(os.urandom(4).hex(), now=host.boottime()))
        recalled = Recalled(state, float("-inf"), restored=False, message="")
    else:
        store, recorder, recalled = _open_state(config, host, log, beside_since)
    saved = recalled.state
    profiles = NodeProfiles(identity.name, saved.node_labels)
    may_enforce, loaded = load.may_enforce(loaded), profiles.apply(loaded)
    config = loaded.config
    brake = open_cgroup_brake(host)
    # The jitter of condition transitions is drawn from the node's name, so that no two nodes of a fleet draw the same.
    conditions = saved.policy.conditions._replace(seed=identity.name)
    saved = saved._replace(policy=saved.policy._replace(conditions=conditions))
    builder = ComponentBuilder(host, identity, wakeups, log, may_act=lambda: _may_act(lock, store))
    stack.callback(builder.close)
    wakeup_sources = WakeupSources(host)
    stack.callback(wakeup_sources.close)
    notifier = sd_notify.open_notifier()
    stack.callback(notifier.close)
    _, bounds = own_cost.limit_descriptors()
    forks, no_forks = fork_meter.open_meter(host)
    stack.callback(forks.close)
    sources = oom_sources.open_sources(host, saved.oom.totals if saved.oom is not None else None)
    stack.callback(sources.close)
    confined = selinux.confinement(map(host.real, (config.sampling.kubelet_dir, config.sampling.pod_logs_dir)))
    notes = (*self_protection.protect_process(), *bounds, *no_forks, *confined)
    if other:
        notes += (Note(NoteKind.AGENT, f"another agent acts on this node ({other}): dry run until it ends"),)
    with lock.writing() as alone:  # the brakes in the state belong to another agent that acts
        restored = recalled.restored and alone
        adopted = _adopt_brakes(host, config, brake, saved, restored=restored, acts=may_enforce)
    samples = None
    if store is not None and not host.recorded:
        facts = sample_recording.HeaderFacts(identity.name, saved.policy.instance, _boot_id(host))
        samples = sample_recording.open_recorder(facts, loaded, kubelet=lambda: builder.kubelet.latest.known)
    snapshots = None
    if samples is not None:
        snapshots = auto_snapshots.open_snapshots(host, loaded, node=identity.name, log=log)
    scan = ProcessScan(host, config, session=lambda: builder.session, kubelet=builder.kubelet)
    stack.callback(scan.close)
    runtime = Runtime(
        file=file,
        wakeup_sources=wakeup_sources,
        brakes=adopted,
        oom_scores=OomScores(host, saved.oom_scores if restored else ()),
        reclaim_runner=ReclaimRunner(
            boottime=host.boottime, wake=wakeups.wake, local_path=lambda path: host.real(host.resolve(path))
        ),
        hook_runner=ReclaimRunner(boottime=host.boottime, wake=wakeups.wake, kind="hook"),
        forks=forks,
        other_oom_handlers=scan.other_oom_handlers,
        zombies=scan.zombies,
        count_zombies_soon=scan.count_zombies_soon,
        kubelet=builder.kubelet,
        profiles=profiles,
        store=store,
        recorder=recorder,
        sample_recorder=samples,
        auto_snapshots=snapshots,
        lock=lock,
        standby=bool(other),
        restorable_until=recalled.restorable_until,
        oom_sources=sources,
        oom_state=saved.oom,
        startup_notes=notes,
        log=log,
        lines_dropped=lambda: writer.dropped_total,
        notifier=notifier,
        boottime=host.boottime,
        own_pod_uid=os.environ.get("POD_UID", ""),
    )
    components = builder.build(loaded, saved.owned)
    scan.start()
    agent = Agent(components, runtime, rebuild=builder.rebuild, policy=saved.policy)
    builder.kubelet.start()
    try:
        agent.serve()
    except AddressError as error:
        raise CannotRunError(f"metrics.address: {error}") from error
    if (active := show.active_profiles(loaded)) is not None:
        log.info("profiles", active=active)
    log.info("started", mode=config.mode, node=identity.name, node_name_from=identity.source, host_root=host.root)
    if (thresholds := builder.kubelet.latest.known) is not None:
        log.info("kubelet thresholds", thresholds=kubelet.describe_thresholds(thresholds))
    self_protection.freeze_collector()
    return agent, wakeups


class ComponentBuilder:
    """Builds the components that depend on the configuration, at the start and after a reload."""

    def __init__(
        self,
        host: Host,
        identity: node_identity.Identity,
        wakeups: Wakeups,
        log: "FilteringBoundLogger",
        *,
        may_act: Callable[[], str],
    ) -> None:
        """`may_act` returns why a dry run cannot start to act; empty if it can, and it does from then on."""
        self._host = host
        self._may_act = may_act
        self._identity = identity
        self._wakeups = wakeups
        self._log = log
        self._statvfs = StatvfsWithTimeout(host.statvfs)
        self._boottime = clock.boottime if host.recorded else host.boottime  # that of a recorded node stands still
        self.session: Session = NoCluster("not connected yet")
        """The newest one."""
        self._enforces = False
        """Whether the newest session acts."""
        self._closed = threading.Event()
        self.kubelet = KubeletWatch(host, configz=self._read_configz, k3s_arguments=self._k3s_arguments)

    def build(self, loaded: LoadedConfig, owned: tuple[OwnedCondition, ...]) -> Components:
        """The components of the first configuration. Raises CannotRunError."""
        session = self.session = self._connect_first(loaded, owned)
        self._enforces = loaded.config.mode is Mode.ENFORCE
        session.start()
        loaded = self._above_kubelet(loaded)
        config = loaded.config
        return Components(
            loaded,
            self._sampler(config),
            session,
            self._disks(config),
            self._reclaim_notes(config),
        )

    def _connect_first(self, loaded: LoadedConfig, owned: tuple[OwnedCondition, ...]) -> Session:
        """The session. Credential plugins need a PID; while there is none this waits, because a restart of the agent
        would have none either."""
        while True:
            no_pid = _no_pid()
            try:
                return self._connect(loaded, owned)
            except CannotRunError as error:
                if not (no_pid or _no_pid()):
                    raise
                self._log.warning("waiting for a PID", reason=str(error), once="credentials")
                _, signals = self._wakeups.wait(NO_PID_RETRY_S)
                if signal.SIGTERM in signals or signal.SIGINT in signals:
                    raise

    def _connect(
        self, loaded: LoadedConfig, owned: tuple[OwnedCondition, ...], previous: Session | None = None
    ) -> Session:
        return _connect(loaded, self._identity, owned, self._wakeups, self._boottime, previous)

    def rebuild(self, before: Components, loaded: LoadedConfig) -> Components:
        """The components of a new configuration. Those that do not depend on a changed key stay.

        Raises:
            ConfigError: this machine cannot do it, such as `mode: enforce` without credentials.
        """
        old = before.loaded.config
        for key in keys.restart_keys():
            if getattr(loaded.config, key.field) != getattr(old, key.field):
                self._log.warning("configuration change needs a restart", key=key.name)
        config = loaded.config._replace(**{key.field: getattr(old, key.field) for key in keys.restart_keys()})
        session = before.session
        if cluster_session.session_inputs(config) != cluster_session.session_inputs(old):
            try:
                session = self._connect(loaded._replace(config=config), before.session.owned(), before.session)
            except CannotRunError as error:
                wrong = "cluster.kubeconfig" if config.cluster.kubeconfig else "mode"
                raise ConfigError((Problem(Origin("this machine"), wrong, str(error)),)) from error
            if config.mode is Mode.ENFORCE and old.mode is not Mode.ENFORCE and (trouble := self._may_act()):
                raise ConfigError((Problem(Origin("this machine"), "mode", trouble),))
            session.start()
            self.session, self._enforces = session, config.mode is Mode.ENFORCE
            # The conditions and taints of the previous session are cleared only if the agent no longer acts; else the
            # new one owns them. The loop does not wait for the threads of the previous session.
            clear = config.mode is not Mode.ENFORCE
            end = functools.partial(self._end_session, before.session, clear=clear)
            workers.start(workers.make_thread(end, name="previous-session"))
        sampler = before.sampler
        if config.sampling != old.sampling or stall.needs_pod_stalls(config.thresholds) != stall.needs_pod_stalls(
            old.thresholds
        ):
            sampler = self._sampler(config)
            before.sampler.close()
        disks = before.disks
        if config.sampling != old.sampling or config.local_storage_limits != old.local_storage_limits:
            disks = self._disks(config)
            before.disks.close(timeout_s=0.0)
        loaded = self._above_kubelet(loaded._replace(config=config))
        return Components(loaded, sampler, session, disks, self._reclaim_notes(config))

    def _end_session(self, session: Session, *, clear: bool) -> None:
        """`clear`: repeat that until the API server answers, or until a newer session owns what this one has set."""
        backoff = RetryBackoff()
        while left := session.stop(clear=clear, withdraw=clear, confirm_s=CONFIRM_S):
            self._log.warning("cleanup incomplete", what=left, once=left)
            wait_s = backoff.failed()
            if not clear or self._closed.wait(wait_s) or self._enforces:
                return

    def _read_configz(self) -> str:
        return self.session.read_configz()  # of the newest session: a reload may replace it

    def _k3s_arguments(self) -> tuple[str, ...]:
        return self.session.k3s_arguments()

    def _above_kubelet(self, loaded: LoadedConfig) -> LoadedConfig:
        """With the thresholds above those of this host's kubelet, where these are known."""
        thresholds = self.kubelet.latest.known or ()
        return loaded._replace(config=above_kubelet.keep_above(loaded.config, thresholds))

    def close(self) -> None:
        self._closed.set()
        self._statvfs.close()
        self.kubelet.close()

    def _sampler(self, config: Config) -> Sampler:
        stalls = stall.needs_pod_stalls(config.thresholds)
        return Sampler(
            self._host,
            config.sampling,
            node_name=self._identity.name,
            statvfs=self._statvfs,
            pod_stalls=stalls,
        )

    def _disks(self, config: Config) -> DiskMonitor:
        return DiskMonitor(self._host, config.sampling, limits=config.local_storage_limits, wake=self._wakeups.wake)

    def _reclaim_notes(self, config: Config) -> tuple[Note, ...]:
        """What will fail of the reclaim actions and of the hook."""
        actions = config.reclaim.actions
        directories = {
            ReclaimKind.CONTAINER_LOGS: (self._host.real(self._host.resolve(config.sampling.pod_logs_dir)),),
            ReclaimKind.JOURNAL: reclaim_runner.JOURNAL_DIRECTORIES,
        }
        return (
            *reclaim_runner.missing_programs(actions, cri_socket=config.sampling.cri_socket),
            *reclaim_runner.read_only_directories(actions, directories),
            *eviction_hook_jobs.notes(config.hooks.before_eviction),
        )


def _may_act(lock: AgentLock, store: StateFile | None) -> str:
    """Why a dry run may not act from now on; empty if it may."""
    other = lock.take()
    if other:
        return f"another agent acts on this node ({other})"
    if store is None or not store.is_unchanged():
        lock.release()
        return "another agent has acted on this node since this one started: restart it"
    return ""


def _no_pid() -> bool:
    """True if the kernel has no PID for another thread."""
    no_pid = workers.start_thread(lambda: None, name="start") is None
    workers.clear_failed_start("start")
    return no_pid


def _connect(
    loaded: LoadedConfig,
    identity: node_identity.Identity,
    owned: tuple[OwnedCondition, ...],
    wakeups: Wakeups,
    boottime: Callable[[], float],
    previous: Session | None,
) -> Session:
    config = loaded.config
    found = credentials.find_credentials(config.cluster.kubeconfig)
    if not found.found:
        if load.may_enforce(loaded):
            raise CannotRunError(f"mode enforce needs the API server, but there are no credentials: {found.reason}")
        if config.cluster.kubeconfig:
            raise CannotRunError(f"no credentials for the API server: {found.reason}")
        return NoCluster(f"no credentials for an API server: {found.reason}")
    from nodeagent.kube import transport

    replaced = previous if isinstance(previous, ClusterSession) else None
    try:
        connection = transport.connect(
            found,
            request_timeout_s=config.cluster.request_timeout_s,
            previous=replaced.transport if replaced is not None else None,
        )
    except credentials.CredentialsError as error:
        raise CannotRunError(str(error)) from error
    return ClusterSession(
        connection,
        config,
        identity,
        wake=wakeups.wake,
        owned=owned,
        previous=replaced,
        clock=boottime,
    )


def _open_state(
    config: Config, host: Host, log: "FilteringBoundLogger", beside_since: float
) -> tuple[StateFile, FlightRecorder | None, Recalled]:
    """The state directory, and the state of the last process."""
    directory, recorder = Path(config.state_dir), None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        recorder = FlightRecorder(directory)
    except OSError as error:
        log.error("no state directory, soft evictions are off", directory=str(directory), reason=error.strerror)
    store = StateFile(directory / STATE_FILE, shape=AgentState, boot_id=_boot_id(host))
    loaded = store.load()
    recalled = state_store.recall(loaded, instance=os.urandom(4).hex(), now=host.boottime(), beside_since=beside_since)
    log.info("state loaded", trust=loaded.trust, message=recalled.message)
    return store, recorder, recalled


def open_cgroup_brake(host: Host) -> CgroupBrake:
    """The brake of this host: cgroup v2 if it has the memory controller, else the v1 freezer."""
    hierarchy = cgroups.detect_hierarchy(host)
    if hierarchy.unified is not None and hierarchy.unified == hierarchy.memory:
        return CgroupBrake(unified=Path(host.real(hierarchy.unified)), freezer=None)
    freezer = None
    with contextlib.suppress(Unreadable):  # no mount table, no freezer: `plan_brake` raises
        mounts = (mount for mount in host.mounts() if mount.fstype == "cgroup")
        freezer = next((Path(host.real(m.point)) for m in mounts if "freezer" in m.super_options.split(",")), None)
    roots = tuple(Path(host.real(root)) for root in (hierarchy.pids, hierarchy.memory) if root is not None)
    return CgroupBrake(unified=None, freezer=freezer, procs_roots=roots)


def _adopt_brakes(
    host: Host, config: Config, brake: CgroupBrake, saved: AgentState, *, restored: bool, acts: bool
) -> ActiveBrakes:
    """The brakes that an earlier process left, to be released. `acts`: the configuration enforces, perhaps only once
    the labels of the node are known."""
    pods: Sequence[PodCgroup] = ()
    if not host.recorded:
        hierarchy = cgroups.detect_hierarchy(host)
        kubepods, _ = cgroups.find_kubepods(host, hierarchy, cgroup_root=config.sampling.cgroup_root)
        with contextlib.suppress(Unreadable):  # removed since it was found: there is no pod
            pods = pod_cgroups.list_pods(host, hierarchy, kubepods).pods if kubepods is not None else ()
    leftover, notes = brakes.leftover_brakes(
        brake,
        [(pod.path, pod.uid) for pod in pods],
        saved=saved.brakes if restored else None,
        acts=acts,
    )
    return ActiveBrakes(brake, leftover, notes=notes)


def _boot_id(host: Host) -> str:
    with contextlib.suppress(Unreadable):  # a recording may lack it
        return host.text("/proc/sys/kernel/random/boot_id").strip() or "unknown"
    return "unknown"
