"""`nodeagent check`: sample this node once or repeatedly, and print the signals and the eviction order.

1. Nothing is changed and nothing is stored.
2. The policy decides from an empty state: grace periods, trends and rate limits are as right after a start. With
   `--watch` the state is kept between reports.
3. A report imports the API client, YAML, JSON and colours only if it uses them (benchmarks/check_start.py).
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.commands import exit_codes, host_names
from nodeagent.config import above_kubelet, load
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import Config, Mode, StartupConfig
from nodeagent.model import (
    DISK_SIGNALS,
    Amount,
    ImageStoreUsage,
    MemoryVolume,
    NodeSnapshot,
    Note,
    NoteKind,
    OomEvents,
    OomKill,
    OomLevel,
    Plan,
    Pod,
    Signal,
    SignalState,
    Threshold,
    ZombieCount,
)
from nodeagent.policy import chosen_victims, engine, oom_attribution, page_cache, ranking, stall
from nodeagent.policy import state as policy_state
from nodeagent.policy.state import PolicyState
from nodeagent.report import node_report
from nodeagent.report.node_report import Report
from nodeagent.sampling import snapshot as snapshots
from nodeagent.sampling.hostfs import host as hostfs
from nodeagent.sampling.hostfs.host import Unreadable
from nodeagent.sampling.node import kubelet_config, other_oom_handlers, zombie_holders, zombies
from nodeagent.sampling.node.oom_counters import OomCgroups, OomKillCounter
from nodeagent.sampling.pods import memory_volumes
from nodeagent.sampling.sampler import Sampler
from nodeagent.sampling.snapshot import SnapshotParts

if TYPE_CHECKING:
    from nodeagent.commands.check_node_fit import NodeFitCheck
    from nodeagent.kube.transport import Transport
    from nodeagent.kube.volume_lookup import Claim, ClaimLocation
    from nodeagent.sampling.disk.measurement import DiskMeasurement
    from nodeagent.sampling.disk.one_shot import OneShotMeasurement

WALK_TIMEOUT_S: Final = 1.0
"""Timeout of the walk when a disk is short: about 500,000 files (docs/performance.md). Longer delays a monitoring
plugin."""
WALK_TIMEOUT_ON_REQUEST_S: Final = 30.0
"""The same with --disk or --signal."""
ZOMBIES_TIMEOUT_S: Final = 0.1
"""Timeout of the count of zombies: some 8,000 processes."""
CLAIMS_TIMEOUT_S: Final = 2.0
"""Timeout of the volume look-ups: a few hundred claims on a healthy cluster."""
UNATTRIBUTED_TIMEOUT_S: Final = 10.0
"""With --disk: timeout of the walk of host directories, for each file system."""
RANKABLE: Final = tuple(signal for signal in Signal if not signal.startswith("containerfs"))
"""Values of `--signal`. containerfs has no thresholds of its own: it is the same file system as nodefs or imagefs."""


class CheckError(Exception):
    """No report can be made. The message is for the user."""

    def __init__(self, message: str, code: int = exit_codes.UNKNOWN) -> None:
        super().__init__(message)
        self.kind = code
        """Exit code of the command."""


class CheckOptions(NamedTuple):
    """The options of the command line and the loaded configuration."""

    loaded: load.LoadedConfig
    config_source: str
    host_root: str
    api: str
    """`auto`, `always` or `never`."""
    pods_file: str | None
    signal: Signal | None
    disk: bool = False
    """Measure disk usage of pods and host directories also if no disk is short."""
    image_store: bool = False
    """Measure what fills the image store."""
    node_labels: Mapping[str, str] | None = None
    """Labels of the node for the profiles; None: those of the API server or of the agent's state."""


class PodListing(NamedTuple):
    """The pods from the API server or from a file."""

    pods: tuple[Pod, ...] | None
    """None: neither was read."""
    synced_at: float | None
    source: str
    """The source, or why there is none."""
    notes: tuple[Note, ...] = ()


def options_from(
    *,
    host_root: str = "/",
    config_file: str | None = None,
    node_name: str | None = None,
    kubeconfig: str | None = None,
    api: str = "auto",
    pods_file: str | None = None,
    signal: str | None = None,
    disk: bool = False,
    image_store: bool = False,
    node_labels: Mapping[str, str] | None = None,
) -> CheckOptions:
    """Load the configuration. Raises CheckError if it or an option is invalid."""
    overrides = load.overrides_from(os.environ, node_name=node_name, kubeconfig=kubeconfig)
    try:
        loaded = load.load(config_file, overrides=overrides)
    except ConfigError as error:
        raise CheckError(str(error), exit_codes.CONFIG) from error
    return CheckOptions(
        loaded=loaded,
        config_source=config_file or "built-in defaults",
        host_root=host_root,
        api=api,
        pods_file=pods_file,
        signal=signal_from(signal),
        disk=disk,
        image_store=image_store,
        node_labels=node_labels,
    )


def signal_from(name: str | None) -> Signal | None:
    """The signal of `--signal`. Raises CheckError."""
    if name is not None and name not in RANKABLE:
        raise CheckError(f"--signal {name}: must be one of {', '.join(RANKABLE)}", exit_codes.USAGE)
    return None if name is None else Signal(name)


# --- sampling --------------------------------------------------------------------------------------------------------


class NodeChecker:
    """Makes reports of one node. Host layout, credentials and the kubelet's configuration are read once."""

    def __init__(self, options: CheckOptions) -> None:
        """Raises CheckError if the host root cannot be opened."""
        self._options = options
        try:
            self._host = hostfs.open_host(options.host_root)
        except Unreadable as error:
            raise CheckError(f"--host-root: {error}", exit_codes.USAGE) from error
        self._node_name = options.loaded.config.node_name or host_names.host_name(self._host)
        self._loaded, self._profile_notes = self._with_profiles()
        # A report has no earlier samples: it shows what an agent that has already started would do.
        self._config = self._loaded.config._replace(startup=StartupConfig(fresh_samples=1))
        self._sampler = Sampler(
            self._host,
            self._config.sampling,
            node_name=self._node_name,
            pod_stalls=stall.needs_pod_stalls(self._config.thresholds),
        )
        self._state: PolicyState | None = None
        self._transport: Transport | None = None
        self._user_name = ""
        """The user of the credentials; empty if it is unknown."""
        self._claim_locations: dict[Claim, ClaimLocation] = {}
        self._disks: OneShotMeasurement | None = None
        self._node_fit: NodeFitCheck | None = None
        self._oom_counter = OomKillCounter(self._host)
        self._kubelet = kubelet_config.read_thresholds(self._host)
        self._asked_for_kubelet = False

    def _with_profiles(self) -> tuple[load.LoadedConfig, tuple[Note, ...]]:
        """The configuration of this node, and which profiles apply."""
        options = self._options
        if options.loaded.profiles is None:
            return options.loaded, ()
        from nodeagent.commands import node_labels

        api = "never" if options.pods_file is not None and options.api == "auto" else options.api
        return node_labels.apply(
            options.loaded, self._host, node_name=self._node_name, given=options.node_labels, api=api
        )

    def close(self) -> None:
        """Close descriptors and connections."""
        self._sampler.close()
        self._oom_counter.close()
        if self._disks is not None:
            self._disks.close()
        if self._transport is not None:
            self._transport.close()

    def make_report(self) -> Report:
        """Sample, decide and report. Raises CheckError if `--api always` gets no answer."""
        listing = self._list_pods()
        self._follow_kubelet()
        node = self._sampler.sample_node()
        parts = SnapshotParts(
            node,
            self._sampler.read_pods(node, listing.pods),
            pods_synced_at=listing.synced_at,
            zombies=self._count_zombies(),
        )
        snapshot = snapshots.assemble_snapshot(parts)
        now = self._host.boottime()
        before = self._state if self._state is not None else policy_state.initial("check", now=now)
        plan, self._state = engine.decide(snapshot, before, now=now, config=self._config)
        walk_reason = self._walk_reason(plan)
        if walk_reason and self._host.recorded:
            message = f"{walk_reason}: disk usage cannot be measured, a recording contains no files of pods"
            listing = listing._replace(notes=(*listing.notes, Note(NoteKind.DISKS, message)))
        elif walk_reason:
            snapshot = snapshots.assemble_snapshot(parts._replace(disks=self._measure_disks(snapshot)))
            now = self._host.boottime()
            plan, self._state = engine.decide(snapshot, before, now=now, config=self._config)
        plan = self._ranked(plan, snapshot, now)
        if self._config.protection.node_fit:
            snapshot, fit_notes = self._read_node_fit(plan, snapshot)
            listing = listing._replace(notes=(*listing.notes, *fit_notes))
            # It decides from the same state as before, so that no grace period counts twice.
            plan, self._state = engine.decide(snapshot, before, now=now, config=self._config)
            plan = self._ranked(plan, snapshot, now)
        report = Report(
            snapshot=snapshot,
            plan=ranking.with_key_texts(self._with_messages(plan, snapshot)),
            mode=self._config.mode.value,
            config_source=self._options.config_source,
            pods_source=listing.source,
            kubelet=self._kubelet.kubelet,
            oom_kills=self._oom_kills(snapshot),
            page_cache=page_cache.reclaimable(snapshot, config=self._config),
            memory_volumes=self._memory_volumes(),
            image_store=self._image_store(snapshot) if self._options.image_store else None,
        )
        return report._replace(notes=self._notes(report, listing))

    def _ranked(self, plan: Plan, snapshot: NodeSnapshot, now: float) -> Plan:
        """The plan with the eviction order for the signal of `--signal`."""
        if self._options.signal is None:
            return plan
        return ranked_for(plan, snapshot, self._options.signal, now=now, config=self._config)

    def _read_node_fit(self, plan: Plan, snapshot: NodeSnapshot) -> tuple[NodeSnapshot, tuple[Note, ...]]:
        """The snapshot with whether other nodes take the first pods, where the report needs it."""
        from nodeagent.commands import check_node_fit

        if not check_node_fit.is_wanted(plan, config=self._config, on_request=self._options.signal is not None):
            return snapshot, ()
        if self._node_fit is None:
            self._node_fit = check_node_fit.NodeFitCheck(self._host.boottime)
        return self._node_fit.read(plan, snapshot, self._transport, node_name=self._node_name)

    def _memory_volumes(self) -> tuple[MemoryVolume, ...]:
        if self._host.recorded:
            return ()  # a recording contains no files of pods
        layout = self._sampler.host_layout().layout
        return memory_volumes.read_memory_volumes(self._host, layout.kubelet or self._config.sampling.kubelet_dir)

    def _count_zombies(self) -> ZombieCount | None:
        """Who holds PIDs by zombies, as far as that is found in a moment."""
        if self._host.recorded:
            return None  # a recording contains a few processes
        found = zombies.count_zombies(self._host, max_s=ZOMBIES_TIMEOUT_S, pause=lambda _seconds: None)
        return zombie_holders.name_holders(self._host, found) if found is not None else None

    def _oom_kills(self, snapshot: NodeSnapshot) -> tuple[OomKill, ...]:
        """The OOM kills in the cgroups that exist, since each was made. One file is read if the node has none."""
        if not self._oom_counter.read():
            return ()
        layout = self._sampler.host_layout()
        kubepods = layout.kubepods.path if layout.kubepods else ""
        counts = [
            count if count.place.level is OomLevel.POD else count._replace(gone=OomEvents())
            for count in OomCgroups(self._host).read(layout.hierarchy, kubepods)
        ]
        pods = {view.pod.cgroup_uid: view for view in snapshot.pods}
        return oom_attribution.attribute(None, counts, (), pods).kills

    def _follow_kubelet(self) -> None:
        """Keep the thresholds above the kubelet's. Where files and flags give nothing, the API server is asked once."""
        if self._kubelet.known is None and self._transport is not None and not self._asked_for_kubelet:
            from nodeagent.commands import check_kubelet

            self._asked_for_kubelet = True
            self._kubelet = check_kubelet.ask(self._kubelet, self._host, self._transport, node_name=self._node_name)
        self._config = above_kubelet.keep_above(self._config, self._kubelet.known or ())

    def _with_messages(self, plan: Plan, snapshot: NodeSnapshot) -> Plan:
        """The plan with its eviction messages. They contain the memory of each container, which is read only for
        victims."""
        views = {view.pod.uid: view for view in snapshot.pods}
        victims = []
        for victim in plan.victims:
            view = views[victim.pod.uid]
            if view.usage is not None:
                view = view._replace(usage=self._sampler.with_container_memory(view.usage))
            victims.append(chosen_victims.with_current_text(victim, view, plan=plan))
        return plan._replace(victims=tuple(victims))

    def _walk_reason(self, plan: Plan) -> str:
        """Why disk usage is measured; empty if it is not. A walk takes seconds, so that it needs a reason."""
        if self._options.disk:
            return "--disk"
        if self._options.signal in DISK_SIGNALS:
            return f"--signal {self._options.signal}"
        met = (SignalState.SOFT, SignalState.HARD)
        short = [verdict.signal for verdict in plan.signals if verdict.signal in DISK_SIGNALS and verdict.state in met]
        return f"{short[0]} is short" if short else ""

    def _measure_disks(self, snapshot: NodeSnapshot) -> "DiskMeasurement":
        if self._disks is None:
            from nodeagent.sampling.disk.one_shot import OneShotMeasurement

            around = self._sampler.host_layout()
            self._disks = OneShotMeasurement(
                self._host, self._config.sampling, hierarchy=around.hierarchy, layout=around.layout
            )
        if not self._options.disk:
            return self._disks.measure(snapshot, timeout_s=WALK_TIMEOUT_S)
        from nodeagent.report.progress import ProgressLine

        line = ProgressLine()
        try:
            return self._disks.measure(
                snapshot,
                timeout_s=WALK_TIMEOUT_ON_REQUEST_S,
                unattributed_timeout_s=UNATTRIBUTED_TIMEOUT_S,
                on_progress=line.show,
            )
        finally:
            line.clear()

    def _image_store(self, snapshot: NodeSnapshot) -> ImageStoreUsage | None:
        if self._host.recorded:
            raise CheckError("--image-store: a recording contains no image store", exit_codes.USAGE)
        from nodeagent.commands import check_image_store

        layout = self._sampler.host_layout().layout
        return check_image_store.measure(self._host, layout, snapshot, socket=self._config.sampling.cri_socket)

    def _notes(self, report: Report, listing: PodListing) -> tuple[Note, ...]:
        warnings = tuple(Note(NoteKind.CONFIGURATION, str(problem)) for problem in self._loaded.warnings)
        assumed = " (defaults assumed)" if self._kubelet.known is None else ""
        when = {node_report.KUBELET_FIRST: "would", node_report.SOFT_FIRST: "may"}
        earlier_kubelet = tuple(
            Note(NoteKind.KUBELET, f"the kubelet {when[each.verdict]} act first{assumed}: {each.message}")
            for each in node_report.compare_with_kubelet(report)
            if each.verdict in when
        )
        notes = (
            *report.snapshot.notes,
            *listing.notes,
            *report.plan.notes,
            *warnings,
            *self._profile_notes,
            *self._kubelet.notes,
            *above_kubelet.notes(self._config.thresholds, report.snapshot),
            *self._status_of_agent(report.snapshot.taken_at),
            *self._other_oom_handlers(),
            *_unmatched_pods(report.snapshot, listing),
            *earlier_kubelet,
        )
        return tuple(dict.fromkeys(notes))  # the agent may have stored what the report finds as well

    def _status_of_agent(self, now: float) -> tuple[Note, ...]:
        """The notes that the agent of this host has stored. OOM handlers are left out: the report detects them
        itself."""
        if self._host.recorded or not os.path.isdir(self._config.state_dir):
            return ()
        from nodeagent.records import status_file

        stored = status_file.read_status(self._config.state_dir, now=now)
        return tuple([note for note in stored if note.kind is not NoteKind.OTHER_OOM_HANDLERS])

    def _other_oom_handlers(self) -> tuple[Note, ...]:
        kubepods = self._sampler.host_layout().kubepods
        return other_oom_handlers.find_handlers(self._host, kubepods=kubepods.path if kubepods else "")

    # --- pods

    def _list_pods(self) -> PodListing:
        if self._options.pods_file is not None:
            return self._from_file(self._options.pods_file)
        if self._options.api == "never":
            return PodListing(None, None, "this host alone (--no-api)")
        if self._options.api == "auto" and self._host.recorded:
            return PodListing(None, None, "this recording alone")
        return self._from_api()

    def _from_file(self, path: str) -> PodListing:
        from nodeagent.kube import pod_list_file

        try:
            listed = pod_list_file.read_pod_list(path, node_name=self._config.node_name)
        except pod_list_file.PodListError as error:
            raise CheckError(f"--pods {path}: {error}") from error
        claims = sum(bool(pod.claims) for pod in listed.pods)
        message = f"a file of pods does not contain the nodes of local volumes; pods that mount claims: {claims}"
        notes = (Note(NoteKind.VOLUMES, message),) if claims and self._config.protection.node_bound else ()
        return PodListing(listed.pods, self._host.boottime(), path, listed.notes + notes)

    def _from_api(self) -> PodListing:
        from nodeagent.kube import credentials

        found = credentials.find_credentials(self._config.cluster.kubeconfig)
        if not found.found:
            if self._options.api == "always" or self._config.cluster.kubeconfig:
                raise CheckError(f"no API server: {found.reason}")
            return PodListing(None, None, f"this host alone, {found.reason}")
        from nodeagent.kube import (
            api_errors,
            identity_probe,
            impersonation,
            node_identity,
            pod_watch,
            transport,
            user_review,
            volume_lookup,
        )

        notes: tuple[Note, ...] = ()
        try:
            if self._transport is None:
                timeout_s = self._config.cluster.request_timeout_s
                self._transport = transport.connect(found, request_timeout_s=timeout_s)
                user = user_review.fetch_user(self._transport)
                self._user_name = user.name
                mode = self._config.cluster.identity
                identity_probe.act_unprobed(self._transport, user, self._node_name, mode)
            view = pod_watch.list_pods(self._transport, self._node_name)
            if self._config.protection.node_bound:
                placed, trouble = volume_lookup.look_up_all(
                    self._transport,
                    view.pods,
                    node_name=self._node_name,
                    known=self._claim_locations,
                    for_s=CLAIMS_TIMEOUT_S,
                )
                view = view._replace(pods=placed)
                notes = (Note(NoteKind.VOLUMES, trouble),) if trouble else ()
            if self._config.mode is Mode.ENFORCE and self._config.conditions.taint:
                me = node_identity.Identity(self._node_name, "", self._user_name)
                notes += (Note(NoteKind.TAINTS, node_identity.NO_TAINT_RIGHTS),) if me.node_credentials else ()
            identity = self._transport.impersonation
            notes += (Note(NoteKind.IDENTITY, identity.note),) if identity.note else ()
        except (api_errors.ApiError, credentials.CredentialsError) as error:
            if self._options.api == "always":
                raise CheckError(f"the API server did not list the pods of {self._node_name}: {error}") from error
            return PodListing(
                None, None, "this host alone, the API server did not answer", (Note(NoteKind.API, str(error)),)
            )
        # Listed just now, on the clock of the host: a recording has another one than this machine.
        source = f"the API server {self._transport.server}"
        if identity.complete:
            source += f", as {impersonation.NODE_USER}{self._node_name}"
        return PodListing(view.pods, self._host.boottime(), source, view.notes + notes)


def _unmatched_pods(snapshot: NodeSnapshot, listing: PodListing) -> tuple[Note, ...]:
    """A note if the API server lists no pods of a node that has pods: the usual sign of a wrong node name."""
    if listing.pods is None or listing.pods or not snapshot.pods:
        return ()
    message = f"{listing.source} lists no pods of node {snapshot.node}, but this host has pods: check --node-name"
    return (Note(NoteKind.PODS, message),)


def ranked_for(plan: Plan, snapshot: NodeSnapshot, signal: Signal, *, now: float, config: Config) -> Plan:
    """The same plan with the eviction order for `signal`.

    The policy decides again on a snapshot in which nothing of that signal is available.
    """
    observed = snapshot.observations[signal]
    exhausted = observed._replace(available=0, capacity=observed.capacity or 1, read_at=snapshot.taken_at)
    # A soft threshold is not due at once: the policy computes only the order.
    threshold = Threshold(signal, Amount(1, None, "1"), grace_period_s=1.0)
    ranked, _ = engine.decide(
        snapshot._replace(observations={**snapshot.observations, signal: exhausted}),
        policy_state.initial("check", now=now),
        now=now,
        config=config._replace(thresholds=(threshold,)),
    )
    return plan._replace(ranking=ranked.ranking, rank_order=ranked.rank_order, ranked_for=ranked.ranked_for)
