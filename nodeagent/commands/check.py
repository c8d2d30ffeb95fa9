"""`nodeagent check`: look at this node once, or again and again, and print what was seen and what would be done.

Nothing is changed and nothing is kept: the policy decides from an empty state, so that what depends on earlier samples
(grace periods, trends, budgets) is reported as it would stand right after a start. With `--watch` the state goes on.

Every room that one report may do without (the API, YAML, JSON, colours) is imported when it is asked for: start to
report is held to a few times the cost of starting Python (benchmarks/check_start.py).
"""

import os
import sys
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.commands import exit_codes, standard_streams
from nodeagent.config import load
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import Config, Mode, StartupConfig
from nodeagent.model import (
    DISK_SIGNALS,
    Amount,
    NodeSnapshot,
    Note,
    NoteKind,
    Plan,
    Pod,
    Signal,
    SignalState,
    Threshold,
)
from nodeagent.policy import engine, ranking, stall
from nodeagent.policy.state import PolicyState, initial
from nodeagent.report import node_report, sections, text
from nodeagent.report.node_report import Report
from nodeagent.sampling.hostfs.host import Host, Unreadable, open_host
from nodeagent.sampling.node import kubelet_config, other_oom_handlers
from nodeagent.sampling.sampler import Sampler

if TYPE_CHECKING:
    from nodeagent.kube.transport import Transport
    from nodeagent.kube.volume_lookup import Claim, ClaimLocation
    from nodeagent.sampling.disk.one_shot import OneShotMeasurement

SHORT_DISK_S: Final = 1.0
"""How long pods' disks are walked when a disk is short: 500,000 files (MEASURED, the kernel), still soon enough for a
monitoring plugin."""
DISK_S: Final = 30.0
"""The same when it was asked for."""
CLAIMS_S: Final = 2.0
"""How long the API is asked about the volumes that pods mount: a few hundred claims on a healthy cluster."""
UNATTRIBUTED_TIMEOUT_S: Final = 10.0
"""How long host directories are walked for each file system when it was asked for."""
RANKABLE: Final = tuple(signal for signal in Signal if not signal.startswith("containerfs"))
"""Signals that `--signal` takes: containerfs has no thresholds of its own, it is nodefs or imagefs by another name."""
_HOSTNAME_FILES: Final = ("/proc/sys/kernel/hostname", "/etc/hostname")


class CheckError(Exception):
    """No report can be made. The message is for the user."""

    def __init__(self, message: str, code: int = exit_codes.UNKNOWN) -> None:
        super().__init__(message)
        self.kind = code
        """Exit code of the command."""


class CheckOptions(NamedTuple):
    """What the user asked for, checked as far as it can be without looking at the node."""

    loaded: load.LoadedConfig
    config_source: str
    host_root: str
    api: str
    """`auto`, `always` or `never`."""
    pods_file: str | None
    signal: Signal | None
    disk: bool = False
    """Measure what the pods hold on disk even when no disk is near a threshold, and take longer for it."""


class PodListing(NamedTuple):
    """The pods as somebody other than this host told of them."""

    pods: tuple[Pod, ...] | None
    """None: nobody did."""
    synced_at: float | None
    source: str
    """Who did, or why nobody."""
    notes: tuple[Note, ...] = ()


def check_options(
    *,
    host_root: str = "/",
    config_file: str | None = None,
    node_name: str | None = None,
    kubeconfig: str | None = None,
    api: str = "auto",
    pods_file: str | None = None,
    signal: str | None = None,
    disk: bool = False,
) -> CheckOptions:
    """The wish behind these options. Raises CheckError when the configuration or an option is wrong."""
    overrides = load.overrides_from(os.environ, node_name=node_name, kubeconfig=kubeconfig)
    try:
        loaded = load.load(config_file, overrides=overrides)
    except ConfigError as error:
        raise CheckError(str(error), exit_codes.CONFIG) from error
    if signal is not None and signal not in RANKABLE:
        raise CheckError(f"--signal {signal}: must be one of {', '.join(RANKABLE)}", exit_codes.USAGE)
    return CheckOptions(
        loaded=loaded,
        config_source=config_file or "built-in defaults",
        host_root=host_root,
        api=api,
        pods_file=pods_file,
        signal=None if signal is None else Signal(signal),
        disk=disk,
    )


# --- looking ---------------------------------------------------------------------------------------------------------


class NodeChecker:
    """Looks at one node, as often as asked. What only has to be found out once is found out once."""

    def __init__(self, wish: CheckOptions) -> None:
        """Raises CheckError when there is no such host."""
        self._wish = wish
        # One look has no earlier samples to wait for: it reports what an agent that has been running would do.
        self._config = wish.loaded.config._replace(startup=StartupConfig(fresh_samples=1))
        try:
            self._host = open_host(wish.host_root)
        except Unreadable as error:
            raise CheckError(f"--host-root: {error}", exit_codes.USAGE) from error
        self._node_name = self._config.node_name or _host_name(self._host)
        self._sampler = Sampler(
            self._host,
            self._config.sampling,
            node_name=self._node_name,
            pod_stalls=stall.needs_pod_stalls(self._config.thresholds),
        )
        self._state: PolicyState | None = None
        self._transport: Transport | None = None
        self._places: dict[Claim, ClaimLocation] = {}
        self._disks: OneShotMeasurement | None = None
        self._kubelet, self._kubelet_notes = kubelet_config.find(self._host)

    def close(self) -> None:
        """Give back descriptors and connections."""
        self._sampler.close()
        if self._disks is not None:
            self._disks.close()
        if self._transport is not None:
            self._transport.close()

    def make_report(self) -> Report:
        """One report. Raises CheckError when the API was demanded and did not answer."""
        known = self._known_pods()
        snapshot = self._sampler.sample(known.pods, known.synced_at)
        now = self._host.boottime()
        before = self._state if self._state is not None else initial("check", now=now)
        plan, self._state = engine.decide(snapshot, before, now=now, config=self._config)
        wanted = self._disks_wanted(plan)
        if wanted and self._host.recorded:
            told = f"{wanted}: what pods and directories hold cannot be measured, a recording has no files of theirs"
            known = known._replace(notes=(*known.notes, Note(NoteKind.DISKS, told)))
        elif wanted:
            snapshot = self._with_disks(snapshot)
            now = self._host.boottime()
            plan, self._state = engine.decide(snapshot, before, now=now, config=self._config)
        if self._wish.signal is not None:
            plan = _ranked_for(plan, snapshot, self._wish.signal, now=now, config=self._config)
        report = Report(
            snapshot=snapshot,
            plan=ranking.with_key_texts(self._worded(plan, snapshot)),
            mode=self._config.mode.value,
            config_source=self._wish.config_source,
            pods_source=known.source,
            kubelet=self._kubelet,
        )
        return report._replace(notes=self._notes(report, known))

    def _worded(self, plan: Plan, snapshot: NodeSnapshot) -> Plan:
        """The plan with the words that its evictions would have: they name what each container uses, which is read for
        victims only."""
        going = {view.pod.uid: view for view in snapshot.pods}
        victims = []
        for victim in plan.victims:
            view = going[victim.pod.uid]
            if view.usage is not None:
                view = view._replace(usage=self._sampler.with_container_memory(view.usage))
            victims.append(engine.with_current_text(victim, view, plan=plan))
        return plan._replace(victims=tuple(victims))

    def _disks_wanted(self, plan: Plan) -> str:
        """Why somebody wants to know who holds the disks; empty when nobody does. Walking takes seconds, so that nobody
        else pays for it."""
        if self._wish.disk:
            return "--disk"
        if self._wish.signal in DISK_SIGNALS:
            return f"--signal {self._wish.signal}"
        bad = (SignalState.SOFT, SignalState.HARD)
        short = [verdict.signal for verdict in plan.signals if verdict.signal in DISK_SIGNALS and verdict.state in bad]
        return f"{short[0]} is short" if short else ""

    def _with_disks(self, snapshot: NodeSnapshot) -> NodeSnapshot:
        if self._disks is None:
            from nodeagent.sampling.disk.one_shot import OneShotMeasurement

            around = self._sampler.host_layout()
            self._disks = OneShotMeasurement(
                self._host, self._config.sampling, hierarchy=around.hierarchy, layout=around.layout
            )
        if not self._wish.disk:
            return self._disks.measured(snapshot, for_s=SHORT_DISK_S)
        from nodeagent.report.progress import ProgressLine

        line = ProgressLine()
        try:
            return self._disks.measured(snapshot, for_s=DISK_S, rest_s=UNATTRIBUTED_TIMEOUT_S, tell=line.show)
        finally:
            line.clear()

    def _notes(self, report: Report, known: PodListing) -> tuple[Note, ...]:
        warnings = tuple(Note(NoteKind.CONFIGURATION, str(problem)) for problem in self._wish.loaded.warnings)
        assumed = " if it has a kubelet's defaults" if self._kubelet is not None and self._kubelet.unread else ""
        when = {node_report.KUBELET_FIRST: "would", node_report.SOFT_FIRST: "may"}
        races = tuple(
            Note(NoteKind.KUBELET, f"it {when[each.verdict]} act first{assumed}: {each.message}")
            for each in node_report.compare_with_kubelet(report)
            if each.verdict in when
        )
        return (
            *report.snapshot.notes,
            *known.notes,
            *report.plan.notes,
            *warnings,
            *self._kubelet_notes,
            *self._others(report.snapshot.taken_at),
            *_unjoined(report.snapshot, known),
            *races,
        )

    def _others(self, now: float) -> tuple[Note, ...]:
        """What an agent that runs here says of itself, and who else kills on this node."""
        said: tuple[Note, ...] = ()
        if not self._host.recorded and os.path.isdir(self._config.state_dir):
            from nodeagent.records import status_file

            said = status_file.read_status(self._config.state_dir, now=now)
        around = self._sampler.host_layout()
        seen = other_oom_handlers.find_handlers(self._host, kubepods=around.kubepods.path if around.kubepods else "")
        return (*[note for note in said if note.kind is not NoteKind.OTHER_OOM_HANDLERS], *seen)

    # --- pods

    def _known_pods(self) -> PodListing:
        if self._wish.pods_file is not None:
            return self._from_file(self._wish.pods_file)
        if self._wish.api == "never":
            return PodListing(None, None, "this host alone, the API was not asked")
        if self._wish.api == "auto" and self._host.recorded:
            return PodListing(None, None, "this recording alone")
        return self._from_api()

    def _from_file(self, path: str) -> PodListing:
        from nodeagent.kube import pod_list_file

        try:
            listed = pod_list_file.read(path, node_name=self._config.node_name)
        except pod_list_file.PodListError as error:
            raise CheckError(f"--pods {path}: {error}") from error
        claims = sum(bool(pod.claims) for pod in listed.pods)
        told = f"a file of pods does not tell whom a local volume binds to this node; pods that mount claims: {claims}"
        notes = (Note(NoteKind.VOLUMES, told),) if claims and self._config.protection.node_bound else ()
        return PodListing(listed.pods, self._host.boottime(), path, listed.notes + notes)

    def _from_api(self) -> PodListing:
        from nodeagent.kube import credentials

        found = credentials.find_credentials(self._config.cluster.kubeconfig)
        if not found.found:
            if self._wish.api == "always" or self._config.cluster.kubeconfig:
                raise CheckError(f"the API cannot be asked: {found.reason}")
            return PodListing(None, None, f"this host alone, {found.reason}")
        from nodeagent.kube import api_errors, node_identity, pod_watch, transport, volume_lookup

        notes: tuple[Note, ...] = ()
        try:
            if self._transport is None:
                timeout_s = self._config.cluster.request_timeout_s
                self._transport = transport.connect(found, request_timeout_s=timeout_s)
            view = pod_watch.list_pods(self._transport, self._node_name)
            if self._config.protection.node_bound:
                placed, trouble = volume_lookup.look_up_all(
                    self._transport, view.pods, node_name=self._node_name, known=self._places, for_s=CLAIMS_S
                )
                view = view._replace(pods=placed)
                notes = (Note(NoteKind.VOLUMES, trouble),) if trouble else ()
            if self._config.mode is Mode.ENFORCE and self._config.conditions.taint:
                me = node_identity.Identity(self._node_name, "", node_identity.whoami(self._transport))
                notes += (Note(NoteKind.TAINTS, node_identity.NO_TAINT_RIGHTS),) if me.node_credentials else ()
        except (api_errors.ApiError, credentials.CredentialsError) as error:
            if self._wish.api == "always":
                raise CheckError(f"the API did not tell the pods of {self._node_name}: {error}") from error
            return PodListing(None, None, "this host alone, the API did not answer", (Note(NoteKind.API, str(error)),))
        # Just asked; on the host's own clock, which in a recording is not this machine's.
        return PodListing(view.pods, self._host.boottime(), f"the API at {self._transport.server}", view.notes + notes)


def _unjoined(snapshot: NodeSnapshot, known: PodListing) -> tuple[Note, ...]:
    """A note when the API's pods are somebody else's: the usual sign of a wrong node name."""
    if known.pods is None or known.pods or not snapshot.pods:
        return ()
    return (
        Note(
            NoteKind.PODS,
            f"{known.source} has no pods of node {snapshot.node}, this host has: is the name right? (--node-name)",
        ),
    )


def _host_name(host: Host) -> str:
    """The host's name as the kubelet would use it (lower case); `unknown` where nothing tells it."""
    if host.root == "/":
        return os.uname().nodename.lower()
    if host.recorded:
        return _recorded_name(host)
    for path in _HOSTNAME_FILES:
        try:
            name = host.read(path).decode("ascii", "replace").strip().lower()
        except Unreadable:
            continue
        if name:
            return name
    return "unknown"


def _ranked_for(plan: Plan, snapshot: NodeSnapshot, signal: Signal, *, now: float, config: Config) -> Plan:
    """The same plan with the pods in the order in which they would go if `signal` alone had run out.

    Asked of the policy itself: it decides once more, about a snapshot in which nothing of that signal is left.
    """
    seen = snapshot.observations[signal]
    starved = seen._replace(available=0, capacity=seen.capacity or 1, read_at=snapshot.taken_at)
    # Soft, so that nothing is due at once and only the order is worked out.
    alone = Threshold(signal, Amount(1, None, "1"), grace_period_s=1.0)
    asked, _ = engine.decide(
        snapshot._replace(observations={**snapshot.observations, signal: starved}),
        initial("check", now=now),
        now=now,
        config=config._replace(thresholds=(alone,)),
    )
    return plan._replace(ranking=asked.ranking, rank_order=asked.rank_order, ranked_for=asked.ranked_for)


def _recorded_name(host: Host) -> str:
    import json

    try:
        return str(json.loads(host.read("/listing/capture.json"))["uname"][1]).lower()
    except (Unreadable, ValueError, KeyError, IndexError, TypeError):
        return "unknown"


# --- showing ---------------------------------------------------------------------------------------------------------


def show(wish: CheckOptions, *, output: str = "text", color: str = "auto", every_s: float | None = None) -> int:
    """Print one report, or one every `every_s` seconds until interrupted, and return the (last) exit code.

    Raises CheckError when no report can be made, OutputError when it cannot be written.
    """
    observer = NodeChecker(wish)
    try:
        while True:
            report = observer.make_report()
            code = exit_codes.exit_code_of(node_report.state(report))
            try:
                _print(report, output=output, color=color, repeated=every_s is not None)
                sys.stdout.flush()
            except OSError as error:
                standard_streams.output_failed(error)
                return code
            if every_s is None:
                return code
            time.sleep(every_s)
    finally:
        observer.close()


def _print(report: Report, *, output: str, color: str, repeated: bool) -> None:
    write = sys.stdout.write
    if output == "json":
        import json

        from nodeagent.records.utf8 import writable
        from nodeagent.report import json_document

        facts = writable(json_document.to_json(report))
        # One line per report when there are many, so that a reader can take them as they come.
        write(json.dumps(facts, indent=None if repeated else 2, allow_nan=False) + "\n")
    elif output == "yaml":
        import yaml

        from nodeagent.records.utf8 import writable
        from nodeagent.report import json_document

        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        facts = writable(json_document.to_json(report))
        write(yaml.dump(facts, Dumper=dumper, sort_keys=False, explicit_start=repeated))
    elif _colourful(color):
        from nodeagent.report import terminal

        console = terminal.console(force=color == "always")
        if repeated:
            console.clear()
        terminal.draw(console, sections.sections(report))
    else:
        write(text.render(sections.sections(report)) + ("\n" if repeated else ""))


def _colourful(color: str) -> bool:
    if color == "auto":
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return color == "always"
