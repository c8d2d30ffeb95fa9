"""Puts the rooms together for `nodeagent run`: configuration, log, host, cluster, state, and the loop over them."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nodeagent.actuators import reclaim_runner
from nodeagent.actuators.brakes import ActiveBrakes, leftover_brakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.conditions import OwnedCondition
from nodeagent.actuators.reclaim_runner import ReclaimRunner
from nodeagent.actuators.session import ClusterSession, NoCluster, Session
from nodeagent.commands import exit_codes
from nodeagent.config import load
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.load import LoadedConfig
from nodeagent.config.problems import ConfigError, Origin, Problem
from nodeagent.config.schema import Config, Mode
from nodeagent.kube import credentials, node_identity
from nodeagent.loop.agent import Agent
from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.observe import STARTUP_API_WAIT_S
from nodeagent.loop.state_store import AgentState, Recalled, recall
from nodeagent.model import Note, NoteKind
from nodeagent.policy import stall
from nodeagent.policy import state as policy_state
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.state_file import StateFile
from nodeagent.runtime import own_cost, sd_notify, self_protection, workers
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.runtime.periodic import Periodic
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.events.fork_meter import open_meter
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, Unreadable, open_host
from nodeagent.sampling.hostfs.statvfs_timeout import StatvfsWithTimeout
from nodeagent.sampling.node import kubelet_config, other_oom_handlers
from nodeagent.sampling.pods import pod_cgroups
from nodeagent.sampling.pods.pod_cgroups import PodCgroup
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.http_server import AddressError
from nodeagent.telemetry.log import LineWriter, open_log

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

STATE_FILE: Final = "state"
NEIGHBOURS_EVERY_S: Final = 300.0
"""How often it is looked who else kills on this node: a walk of /proc, 1.2 ms of CPU."""
STARVED_S: Final = 1.0
"""Between two attempts to begin without a PID."""
NEEDS_RESTART: Final = ("node_name", "state_dir", "logging")
"""Fields of the configuration that are the process' own: a change is said and takes effect at the next start."""


BESIDE_SINCE: Final = "_NODEAGENT_BESIDE_SINCE"
"""Tells this process, when it begins anew, since when (CLOCK_BOOTTIME) it had watched beside another agent."""


class CannotRunError(Exception):
    """The agent cannot do what it was asked to; the message says why and what to do about it."""

    def __init__(self, message: str, code: int = exit_codes.CONFIG) -> None:
        super().__init__(message)
        self.code = code
        """Exit code of the command."""


def run(
    *, config_path: str | None, host_root: str, node_name: str | None, kubeconfig: str | None, dry_run: bool, once: bool
) -> int:
    """Run the agent until SIGTERM or SIGINT; with `once` for one turn. Returns the exit code.

    Raises:
        ConfigError: the configuration cannot be used.
        CannotRunError: it can, but not on this machine.
        IdentityError: the name that was given cannot be a node's.
    """
    try:
        host = open_host(host_root)
    except Unreadable as error:
        raise CannotRunError(f"--host-root: {error}", exit_codes.USAGE) from error

    def configuration(mode: str | None) -> tuple[ConfigFile, LoadedConfig]:
        overrides = load.overrides_from(os.environ, mode=mode, node_name=node_name, kubeconfig=kubeconfig)
        file = ConfigFile(config_path, overrides=overrides)
        return file, file.load()

    file, loaded = configuration("dry-run" if dry_run else None)
    log, writer = open_log(level=loaded.config.logging.level, style=loaded.config.logging.format)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        for problem in loaded.warnings:
            log.warning("configuration warning", problem=str(problem))
        lock = _lock_of(loaded.config, host)
        stack.callback(lock.release)
        other = lock.take() if loaded.config.mode is Mode.ENFORCE and not host.recorded else ""
        beside_since = float(os.environ.pop(BESIDE_SINCE, "-inf"))
        if other:
            file, loaded = configuration("dry-run")
            began = str(host.boottime())
        agent, wakeups = build_agent(
            loaded, file, host, log, writer, stack, lock=lock, other=other, beside_since=beside_since
        )
        anew = False
        try:
            anew = agent.run(wakeups, syncs=1 if once else None)
        finally:
            agent.stop(restarting=anew)
    if anew:
        if other:
            os.environ[BESIDE_SINCE] = began
        # The same process with nothing of the old one left: no thread, no descriptor, no state in memory.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - its own command line
    return exit_codes.OK


def _lock_of(config: Config, host: Host) -> AgentLock:
    def kubepods() -> str | None:
        hierarchy = cgroups.detect_hierarchy(host)
        found, _ = cgroups.find_kubepods(host, hierarchy, cgroup_root=config.sampling.cgroup_root)
        return host.real(f"{hierarchy.memory}{found.path}") if found is not None else None

    return AgentLock(state_dir=config.state_dir, kubepods=kubepods)


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
    """`other`: where another agent acts; this one watches and keeps nothing. `beside_since`: see `recall`."""
    config = loaded.config
    if host.recorded and config.mode is Mode.ENFORCE:
        raise CannotRunError(f"{host.root} is a recorded node; nothing can be enforced there: use --dry-run")
    guess = node_identity.local_name(given=config.node_name)
    wakeups = stack.enter_context(Wakeups((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
    if other:
        store, recorder = None, None
        state = AgentState(policy_state.initial(os.urandom(4).hex(), now=host.boottime()))
        recalled = Recalled(state, float("-inf"), restored=False, message="")
    else:
        store, recorder, recalled = _open_state(config, host, log, beside_since)
    kept = recalled.state
    brake = open_cgroup_brake(host)
    # Conditions are released with a jitter drawn by the node's name: a fleet must not draw the same.
    conditions = kept.policy.conditions._replace(seed=guess.name)
    kept = kept._replace(policy=kept.policy._replace(conditions=conditions))
    builder = ComponentBuilder(host, guess, wakeups, log, may_act=lambda: _may_act(lock, store))
    stack.callback(builder.close)
    alarms = WakeupSources(host)
    stack.callback(alarms.close)
    notifier = sd_notify.open_notifier()
    stack.callback(notifier.close)
    _, bounds = own_cost.limit_descriptors()
    forks, without = open_meter(host)
    stack.callback(forks.close)
    found = (*self_protection.protect_process(), *bounds, *without)
    if other:
        found += (Note(NoteKind.AGENT, f"another agent acts on this node ({other}): dry run until it ends"),)
    with lock.writing() as alone:  # beside an agent that acts, what the state says is held is held by that
        holds = _adopt_brakes(host, config, brake, kept, restored=recalled.restored and alone)
    means = Runtime(
        file=file,
        wakeup_sources=alarms,
        brakes=holds,
        reclaim_runner=ReclaimRunner(
            boottime=host.boottime, wake=wakeups.wake, local_path=lambda path: host.real(host.resolve(path))
        ),
        forks=forks,
        other_oom_handlers=lambda: neighbours.latest,
        store=store,
        recorder=recorder,
        lock=lock,
        standby=bool(other),
        restorable_until=recalled.restorable_until,
        startup_notes=found,
        log=log,
        lines_dropped=lambda: writer.dropped_total,
        notifier=notifier,
        boottime=host.boottime,
        own_pod_uid=os.environ.get("POD_UID", ""),
    )
    parts = builder.build(loaded, kept.owned)
    none: tuple[Note, ...] = ()
    neighbours = Periodic(
        lambda: _neighbours(host, config, builder.session), first=none, every_s=NEIGHBOURS_EVERY_S, name="neighbours"
    )
    stack.callback(neighbours.close)
    agent = Agent(parts, means, rebuild=builder.rebuild, policy=kept.policy)
    try:
        agent.serve()
    except AddressError as error:
        raise CannotRunError(f"metrics.address: {error}") from error
    log.info("started", mode=config.mode, node=guess.name, node_name_from=guess.source, host_root=host.root)
    self_protection.freeze_collector()
    return agent, wakeups


class ComponentBuilder:
    """Makes what depends on the configuration, at the start and after a reload."""

    def __init__(
        self,
        host: Host,
        guess: node_identity.Identity,
        wakeups: Wakeups,
        log: "FilteringBoundLogger",
        *,
        may_act: Callable[[], str],
    ) -> None:
        """`may_act` says why a dry run cannot become an agent that acts; empty when it can, and is one from now on."""
        self._host = host
        self._may_act = may_act
        self._guess = guess
        self._wakeups = wakeups
        self._log = log
        self._statvfs = StatvfsWithTimeout(host.statvfs)
        self.session: Session = NoCluster("not connected yet")
        """The newest."""

    def build(self, loaded: LoadedConfig, owned: tuple[OwnedCondition, ...]) -> Components:
        """Everything anew. Raises CannotRunError."""
        session = self.session = self._connect_first(loaded.config, owned)
        session.start()
        config = loaded.config
        return Components(
            loaded,
            self._sampler(config),
            session,
            self._disks(config),
            reclaim_runner.missing_programs(config.reclaim.actions),
        )

    def _connect_first(self, config: Config, owned: tuple[OwnedCondition, ...]) -> Session:
        """Credentials that a plugin gives need a PID for it. While there is none this waits: whoever would start us
        again has none for us either."""
        while True:
            starved = _starved()
            try:
                return _connect(config, self._guess, owned, self._wakeups)
            except CannotRunError as error:
                if not (starved or _starved()):
                    raise
                self._log.warning("waiting for a PID", reason=str(error), once="credentials")
                _, signals = self._wakeups.wait(STARVED_S)
                if signal.SIGTERM in signals or signal.SIGINT in signals:
                    raise

    def rebuild(self, before: Components, loaded: LoadedConfig) -> Components:
        """The parts of a new configuration; what it does not concern stays as it is.

        Raises:
            ConfigError: it asks for what this machine cannot give, such as `mode: enforce` without credentials.
        """
        old = before.loaded.config
        for field in NEEDS_RESTART:
            if getattr(loaded.config, field) != getattr(old, field):
                self._log.warning("configuration change needs a restart", key=field)
        config = loaded.config._replace(**{field: getattr(old, field) for field in NEEDS_RESTART})
        session = before.session
        if _for_the_cluster(config) != _for_the_cluster(old):
            try:
                session = _connect(config, self._guess, before.session.owned(), self._wakeups)
            except CannotRunError as error:
                key = "cluster.kubeconfig" if config.cluster.kubeconfig else "mode"
                raise ConfigError((Problem(Origin("this machine"), key, str(error)),)) from error
            if config.mode is Mode.ENFORCE and old.mode is not Mode.ENFORCE and (trouble := self._may_act()):
                raise ConfigError((Problem(Origin("this machine"), "mode", trouble),))
            session.start()
            self.session = session
            # What the old session set is cleared only when we no longer act; else the new one owns it. It ends in its
            # own time: the loop does not wait for its threads.
            clear = config.mode is not Mode.ENFORCE
            workers.start(workers.make_thread(lambda: before.session.stop(clear=clear), name="old session"))
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
        missing = reclaim_runner.missing_programs(config.reclaim.actions)
        return Components(loaded._replace(config=config), sampler, session, disks, missing)

    def close(self) -> None:
        self._statvfs.close()

    def _sampler(self, config: Config) -> Sampler:
        stalls = stall.needs_pod_stalls(config.thresholds)
        return Sampler(
            self._host,
            config.sampling,
            node_name=self._guess.name,
            statvfs=self._statvfs,
            pod_stalls=stalls,
        )

    def _disks(self, config: Config) -> DiskMonitor:
        return DiskMonitor(self._host, config.sampling, limits=config.local_storage_limits, wake=self._wakeups.wake)


def _may_act(lock: AgentLock, store: StateFile | None) -> str:
    """Why an agent that watched so far may not act from now on; empty when it may."""
    other = lock.take()
    if other:
        return f"another agent acts on this node ({other})"
    if store is None or not store.is_unchanged():
        lock.release()
        return "another agent has acted on this node since this one started: restart it"
    return ""


def _starved() -> bool:
    """Whether the kernel has no PID for a thread of ours."""
    starved = workers.start_thread(lambda: None, name="start") is None
    workers.clear_failed_start("start")
    return starved


def _for_the_cluster(config: Config) -> tuple[object, ...]:
    """What a session is made from."""
    protection = config.protection
    return (
        config.mode,
        config.cluster,
        config.conditions,
        config.fleet,
        protection.annotations,
        protection.disruption_budgets,
    )


def _connect(
    config: Config, guess: node_identity.Identity, owned: tuple[OwnedCondition, ...], wakeups: Wakeups
) -> Session:
    found = credentials.find_credentials(config.cluster.kubeconfig)
    if not found.found:
        if config.mode is Mode.ENFORCE:
            raise CannotRunError(f"mode enforce needs the API server, but there are no credentials: {found.reason}")
        if config.cluster.kubeconfig:
            raise CannotRunError(f"the API cannot be asked: {found.reason}")
        return NoCluster(f"no credentials for an API server: {found.reason}")
    from nodeagent.kube import transport

    try:
        connection = transport.connect(found, request_timeout_s=config.cluster.request_timeout_s)
    except credentials.CredentialsError as error:
        raise CannotRunError(str(error)) from error
    return ClusterSession(connection, config, guess, wake=wakeups.wake, owned=owned)


def _open_state(
    config: Config, host: Host, log: "FilteringBoundLogger", beside_since: float
) -> tuple[StateFile, FlightRecorder | None, Recalled]:
    """The state directory, and what the last process left in it."""
    directory, recorder = Path(config.state_dir), None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        recorder = FlightRecorder(directory)
    except OSError as error:
        log.error("no state directory, soft evictions are off", directory=str(directory), reason=error.strerror)
    store = StateFile(directory / STATE_FILE, shape=AgentState, boot_id=_boot_id(host))
    loaded = store.load()
    recalled = recall(loaded, instance=os.urandom(4).hex(), now=host.boottime(), beside_since=beside_since)
    log.info("state loaded", trust=loaded.trust, message=recalled.message)
    return store, recorder, recalled


def _neighbours(host: Host, config: Config, session: Session) -> tuple[Note, ...]:
    """Who else kills on this node. Waits a little for the API, if there is one, to tell which pods' processes see no
    others."""
    patience, until = threading.Event(), time.monotonic() + STARTUP_API_WAIT_S
    while (view := session.pods()).awaited and view.synced_at is None and time.monotonic() < until:
        patience.wait(0.1)
    harmless = frozenset(pod.mirror_of or pod.uid for pod in view.pods if not pod.host_pid)
    found, _ = cgroups.find_kubepods(host, cgroups.detect_hierarchy(host), cgroup_root=config.sampling.cgroup_root)
    seen, _ = kubelet_config.read_thresholds(host)
    thresholds, unread = (seen.thresholds, seen.unread) if seen is not None else (None, "")
    return other_oom_handlers.find_handlers(
        host, kubepods=found.path if found else "", kubelet=thresholds, kubelet_unread=unread, isolated=harmless
    )


def open_cgroup_brake(host: Host) -> CgroupBrake:
    """The brakes of this host: v2 where it has the memory controller, else the v1 freezer."""
    hierarchy = cgroups.detect_hierarchy(host)
    if hierarchy.unified is not None and hierarchy.unified == hierarchy.memory:
        return CgroupBrake(unified=Path(host.real(hierarchy.unified)), freezer=None)
    freezer = None
    with contextlib.suppress(Unreadable):  # no mount table, no freezer; `plan_hold` says so when one is wanted
        mounts = (mount for mount in host.mounts() if mount.fstype == "cgroup")
        freezer = next((Path(host.real(m.point)) for m in mounts if "freezer" in m.super_options.split(",")), None)
    roots = tuple(Path(host.real(root)) for root in (hierarchy.pids, hierarchy.memory) if root is not None)
    return CgroupBrake(unified=None, freezer=freezer, procs_roots=roots)


def _adopt_brakes(host: Host, config: Config, brake: CgroupBrake, kept: AgentState, *, restored: bool) -> ActiveBrakes:
    """What an earlier agent may have left held, to be let go."""
    pods: Sequence[PodCgroup] = ()
    if not host.recorded:
        hierarchy = cgroups.detect_hierarchy(host)
        kubepods, _ = cgroups.find_kubepods(host, hierarchy, cgroup_root=config.sampling.cgroup_root)
        with contextlib.suppress(Unreadable):  # it went as it was found: without it there is no pod
            pods = pod_cgroups.list_pods(host, hierarchy, kubepods).pods if kubepods is not None else ()
    held, notes = leftover_brakes(
        brake,
        [(pod.path, pod.uid) for pod in pods],
        saved=kept.brakes if restored else None,
        acts=config.mode is Mode.ENFORCE,
    )
    return ActiveBrakes(brake, held, notes=notes)


def _boot_id(host: Host) -> str:
    with contextlib.suppress(Unreadable):  # a recording need not have it
        return host.text("/proc/sys/kernel/random/boot_id").strip() or "unknown"
    return "unknown"
