"""All pods in eviction order for one resource, each with every reason why it would not go.

Theory of operation. What depends on a pod's object alone (requests, standing protections) is in the `Memo`; what
depends on this snapshot is reckoned here, once for each pod, in plain loops: this is where a decision over many pods
spends its time.
"""

from collections.abc import Sequence

from nodeagent.config.schema import Config, RankingKey
from nodeagent.lean import NamedTuple
from nodeagent.model import (
    SIGNAL_TABLE,
    DiskLayout,
    NodeSnapshot,
    Pod,
    PodSource,
    PodView,
    RankedPod,
    Refusal,
    Signal,
    Tier,
    Unit,
)
from nodeagent.policy import ledger, protection, ranking, relief, requests
from nodeagent.policy.figures import FUTURE_S, sound


class Standing(NamedTuple):
    """What is known of a pod whatever it uses."""

    pod: Pod
    refusals: tuple[Refusal, ...]
    request: int | None
    bad_request: bool
    """A request that cannot be: nothing may be concluded from comparing usage with it."""


class Memo:
    """Answers that depend only on a pod's object and the configuration, kept while both are the same objects.

    Hand the same one to every decision of a process: requests and standing protections are then reckoned once for each
    version of a pod, not in every decision. It changes the speed, never the result.
    """

    __slots__ = ("_config", "_known", "_prepared")

    def __init__(self) -> None:
        self._config: Config | None = None
        self._known: dict[str, dict[str, Standing]] = {}
        self._prepared: Sequence[PodView] = ()

    def __len__(self) -> int:
        """How many answers are kept."""
        return sum(map(len, self._known.values()))

    def prepare(self, pods: Sequence[PodView], signal: Signal, *, config: Config) -> None:
        """Reckon `standing` ahead, while it is calm: otherwise the first decision that matters pays for all pods (4 ms
        instead of 2 for 500). Nothing to do for the pods of last time."""
        if pods is not self._prepared or config is not self._config:
            self.standing(pods, signal, config=config)
            self._prepared = pods

    def standing(self, pods: Sequence[PodView], signal: Signal, *, config: Config) -> list[Standing]:
        """One for each of `pods`, in their order."""
        if self._config is not config:
            self._config, self._known = config, {}
        resource = SIGNAL_TABLE[signal].resource  # requests differ between these alone
        known = self._known.get(resource, {})
        kept: dict[str, Standing] = {}
        answers = []
        for view in pods:
            pod = view.pod
            answer = known.get(pod.uid)
            if answer is None or answer.pod is not pod or pod.source is PodSource.HOST:  # whose request is an estimate
                answer = _standing_of(view, signal, config)
            kept[pod.uid] = answer
            answers.append(answer)
        self._known[resource] = kept
        return answers


def _standing_of(view: PodView, signal: Signal, config: Config) -> Standing:
    request = requests.ranking_request(view, signal=signal)
    believed = sound(request)
    bad = believed != request or _impossible(view.pod)
    return Standing(view.pod, protection.standing(view.pod, config.protection), believed, bad)


def _impossible(pod: Pod) -> bool:
    """Whether a container asks for what cannot be: a sum over it says nothing."""
    for container in pod.containers:
        for asked in (container.requests, container.allocated):
            if asked is None:
                continue
            memory, storage = asked.memory, asked.ephemeral_storage
            if (memory is not None and sound(memory) is None) or (storage is not None and sound(storage) is None):
                return True
    return False


class Lineup(NamedTuple):
    """The order for one signal."""

    signal: Signal
    order: tuple[str, ...]
    """Names of the keys."""
    pods: list[RankedPod]
    """In eviction order; rank 1 is at index 0."""
    by_writes: bool = False
    """Nothing is measured yet: who writes fastest stands first, and usage is what was written lately."""


class Minimum(NamedTuple):
    """The least relief that matters, and what a pod with less of it is told."""

    relief: int
    refusal: Refusal


def line_up(
    snapshot: NodeSnapshot,
    signal: Signal,
    *,
    tier: Tier,
    config: Config,
    growth: ranking.GrowthState,
    memo: Memo,
    minimum: Minimum | None = None,
) -> Lineup:
    """Rank the snapshot's pods for `signal` and ask every protection about each. Without `minimum` relief is no
    matter."""
    rules, kubelet = config.protection, config.ranking.kubelet
    wishes = bool(rules.trusted_namespaces) and tier is Tier.SOFT and not kubelet
    order = ranking.order_for(config.ranking, signal, snapshot.layout, wishes=wishes)
    standing = memo.standing(snapshot.pods, signal, config=config)
    subjects = _subjects(snapshot, signal, standing, order, tier=tier, config=config, growth=growth)
    by_writes = (
        tier is Tier.HARD
        and signal in ranking.DISK_BYTES
        and snapshot.layout is not DiskLayout.UNKNOWN  # only observed: who knows what the writers fill
        and all(each.usage is None for each in subjects)
    )
    if by_writes:
        order = (ranking.WRITE_RATE, *order)
        subjects = _writers(subjects, snapshot, signal, config=config)
    scene = protection.Scene(rules, tier, SIGNAL_TABLE[signal].resource, snapshot.taken_at, snapshot.wall_time)
    asked, own_uid, layout = protection.asked(scene), snapshot.own_pod_uid, snapshot.layout
    most = ledger.usage_limit(snapshot, signal, config=config)
    reasons = {known.pod.uid: known.refusals for known in standing}
    pods = []
    for rank, (values, subject) in enumerate(ranking.ranked(subjects, order), 1):
        view, pod, used, request = subject[:4]
        freed = None if used is None else used if by_writes else relief.of(view.usage, signal, layout, most=most)
        refusals = reasons[pod.uid] + protection.momentary(pod, view.usage, used, scene, asked)
        if own_uid and pod.uid == own_uid:
            refusals = (protection.OWN_POD, *refusals)
        if minimum is not None and not refusals and (freed or 0) < minimum.relief:
            refusals = (minimum.refusal,)
        pods.append(RankedPod(view, rank, (), used, request, freed, refusals, values))
    return Lineup(signal, order, pods, by_writes)


def _writers(
    subjects: Sequence[ranking.Subject], snapshot: NodeSnapshot, signal: Signal, *, config: Config
) -> list[ranking.Subject]:
    """The subjects with what they have written in place of what they hold, which nobody knows yet."""
    most = ledger.usage_limit(snapshot, signal, config=config)
    oldest_s, at = config.sampling.stale_after_s, snapshot.taken_at
    return [
        each._replace(usage=ranking.written_of(each.view.usage, at=at, oldest_s=oldest_s, most=most))
        for each in subjects
    ]


def _subjects(
    snapshot: NodeSnapshot,
    signal: Signal,
    standing: Sequence[Standing],
    order: tuple[str, ...],
    *,
    tier: Tier,
    config: Config,
    growth: ranking.GrowthState,
) -> list[ranking.Subject]:
    """Every pod with its numbers. A usage that is stale, absurd or held against an impossible request is not known."""
    rules, layout, wall_time, taken_at = config.protection, snapshot.layout, snapshot.wall_time, snapshot.taken_at
    oldest, newest = taken_at - config.sampling.stale_after_s, taken_at + FUTURE_S
    most = ledger.usage_limit(snapshot, signal, config=config)
    growing = ranking.growth_of(growth, signal, layout, at=taken_at) if _needs_growth(order) else None
    owners = ranking.siblings(snapshot.pods) if RankingKey.DUPLICATE_ON_NODE in order else None
    wishes, has_request = ranking.WISH in order, SIGNAL_TABLE[signal].unit is Unit.BYTES
    disk = signal in ranking.DISKS
    subjects = []
    for view, known in zip(snapshot.pods, standing, strict=True):
        pod, usage = view
        used = None
        if usage is not None and oldest <= usage.read_at <= newest and not known.bad_request:
            used = ranking.usage_of(usage, signal, layout, most=most)
            if used is not None and disk and ranking.disk_is_old(usage, at=taken_at):
                used = None
        subjects.append(
            ranking.Subject(
                view,
                pod,
                used,
                known.request if has_request else None,
                protection.wish(pod, rules, tier=tier) if wishes else 0.0,
                growing(usage, used) if growing is not None else 0.0,
                owners is None or pod.owner is None or owners.get(pod.owner.uid, 0) < 2,
                wall_time,
            )
        )
    return subjects


def _needs_growth(order: tuple[str, ...]) -> bool:
    return RankingKey.GROWTH in order or ranking.PROJECTED_USAGE in order
