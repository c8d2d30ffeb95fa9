"""All pods in eviction order for one resource, each with every reason why it would not go.

Theory of operation. What depends on a pod's object alone (requests, standing protections) is in the `Memo`; what
depends on this snapshot is reckoned here, once for each pod, in plain loops: this is where a decision over many pods
spends its time. The hard tier's order by memory, which must be there in milliseconds, looks (unless it is configured
otherwise) neither at the time nor at one pod beside another: the memo keeps it and reckons anew only the pods that
changed since.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nodeagent.config.schema import Config, RankingKey
from nodeagent.model import (
    DISK_BYTE_SIGNALS,
    DISK_SIGNALS,
    MEMORY_SIGNALS,
    NO_RESOURCES,
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
from nodeagent.policy import in_flight, protection, ranking, relief, requests
from nodeagent.policy.plausibility import MAX_CLOCK_SKEW_S, plausible


class PodFacts(NamedTuple):
    """What is known of a pod whatever it uses."""

    pod: Pod
    refusals: tuple[Refusal, ...]
    request: int | None
    bad_request: bool
    """A request that cannot be: nothing may be concluded from comparing usage with it."""


class _Row(NamedTuple):
    """A pod as it stands in an order, before it is known who stands before it."""

    view: PodView
    used: int | None
    request: int | None
    freed: int | None
    refusals: tuple[Refusal, ...]
    values: ranking.Values


class _Terms(NamedTuple):
    """What a kept order was reckoned by, beside the pods and the configuration."""

    order: tuple[str, ...]
    layout: DiskLayout
    most: int


class _Kept(NamedTuple):
    """An order, and what it takes to bring it up to date."""

    terms: _Terms
    views: Sequence[PodView]
    """In the order of the snapshot."""
    places: list[ranking.SortKey]
    """Ascending; `rows` is in the same order."""
    rows: list[_Row]
    by_uid: dict[str, ranking.SortKey]
    restless: frozenset[str]
    """UIDs of terminating pods: what is said of them changes with the time."""
    oldest: float
    newest: float
    """No usage in it was read before or after these."""


class RankingCache:
    """Answers that depend only on a pod's object and the configuration, kept while both are the same objects; and the
    last order of the kind that can be kept.

    Hand the same one to every decision of a process: requests, standing protections and places are then reckoned once
    for each version of a pod, not in every decision. It changes the speed, never the result.
    """

    __slots__ = ("_config", "_kept", "_known", "_prepared")

    def __init__(self) -> None:
        self._config: Config | None = None
        self._known: dict[str, dict[str, PodFacts]] = {}
        self._kept: _Kept | None = None
        self._prepared: Sequence[PodView] = ()

    def __len__(self) -> int:
        """How many answers are kept."""
        return sum(map(len, self._known.values()))

    def prepare(self, snapshot: NodeSnapshot, *, config: Config) -> None:
        """Line up ahead, while it is calm: otherwise the first decision that matters pays for all pods (4 ms instead of
        1 for 500). Nothing to do for the pods of last time."""
        if snapshot.pods is self._prepared and config is self._config:
            return
        look = _look_at(snapshot, Signal.MEMORY, tier=Tier.HARD, config=config, growth=ranking.GrowthState())
        if look.keeps:
            self.rows(look)
        else:
            self.standing(snapshot.pods, Signal.MEMORY, config=config)
        self._prepared = snapshot.pods

    def standing(self, pods: Sequence[PodView], signal: Signal, *, config: Config) -> list[PodFacts]:
        """One for each of `pods`, in their order."""
        known = self._answers(signal, config)
        kept: dict[str, PodFacts] = {}
        answers = []
        for view in pods:
            kept[view.pod.uid] = answer = _answer(known, view, signal, config)
            answers.append(answer)
        self._known[SIGNAL_TABLE[signal].resource] = kept
        return answers

    def _answers(self, signal: Signal, config: Config) -> dict[str, PodFacts]:
        if self._config is not config:
            self._config, self._known, self._kept = config, {}, None
        return self._known.setdefault(SIGNAL_TABLE[signal].resource, {})  # requests differ between these alone

    def rows(self, look: "_RankingContext") -> list[_Row]:
        """The order for a look that `keeps`. Belongs to the memo."""
        known = self._answers(look.signal, look.config)
        pods, kept = look.snapshot.pods, self._kept
        changed = _changed(kept, look) if kept is not None else None
        span = _span(look, [pods[index] for index in changed]) if changed is not None else None
        if kept is None or changed is None or span is None:
            places, rows = _sorted(*_rows(look, pods, self.standing(pods, look.signal, config=look.config)))
            self._kept = _kept(look, places, rows)
            return rows
        views = [pods[index] for index in changed]
        answers = [_answer(known, view, look.signal, look.config) for view in views]
        known.update(zip([view.pod.uid for view in views], answers, strict=True))
        self._kept = None  # until every one of them is moved
        _move(kept, *_rows(look, views, answers))
        restless = kept.restless.difference([view.pod.uid for view in views]) | _restless(views)
        oldest, newest = min(kept.oldest, span[0]), max(kept.newest, span[1])
        self._kept = kept._replace(views=pods, restless=restless, oldest=oldest, newest=newest)
        return kept.rows


def _answer(known: dict[str, PodFacts], view: PodView, signal: Signal, config: Config) -> PodFacts:
    pod = view.pod
    answer = known.get(pod.uid)
    if answer is None or answer.pod is not pod or pod.source is PodSource.HOST:  # whose request is an estimate
        return _standing_of(view, signal, config)
    return answer


def _standing_of(view: PodView, signal: Signal, config: Config) -> PodFacts:
    request = requests.ranking_request(view, signal=signal)
    believed = plausible(request)
    bad = believed != request or _impossible(view.pod)
    return PodFacts(view.pod, protection.object_refusals(view.pod, config.protection), believed, bad)


def _impossible(pod: Pod) -> bool:
    """Whether a container asks for what cannot be: a sum over it says nothing. What was allocated counts before what is
    wanted: anybody may ask a resize for more than exists, which the kubelet refuses."""
    for container in pod.containers:
        wanted, given = container.requests, container.allocated or NO_RESOURCES
        for asked, allocated in (
            (wanted.memory, given.memory),
            (wanted.ephemeral_storage, given.ephemeral_storage),
        ):
            counts = asked if allocated is None else allocated
            if counts is not None and plausible(counts) is None:
                return True
    return False


class RankedPods(NamedTuple):
    """The order for one signal."""

    signal: Signal
    order: tuple[str, ...]
    """Names of the keys."""
    pods: list[RankedPod]
    """In eviction order; rank 1 is at index 0."""
    by_writes: bool = False
    """Nothing is measured yet: who writes fastest stands first, and usage is what was written lately."""


class MinimumRelief(NamedTuple):
    """The least relief that matters, and what a pod with less of it is told."""

    relief: int
    refusal: Refusal


def rank_pods(
    snapshot: NodeSnapshot,
    signal: Signal,
    *,
    tier: Tier,
    config: Config,
    growth: ranking.GrowthState,
    memo: RankingCache,
    minimum: MinimumRelief | None = None,
) -> RankedPods:
    """Rank the snapshot's pods for `signal` and ask every protection about each. Without `minimum` relief is no
    matter."""
    look = _look_at(snapshot, signal, tier=tier, config=config, growth=growth)
    order, by_writes = look.order, False
    if look.keeps:
        rows = memo.rows(look)
    else:
        standing = memo.standing(snapshot.pods, signal, config=config)
        subjects = _subjects(look, snapshot.pods, standing)
        by_writes = (
            tier is Tier.HARD
            and signal in DISK_BYTE_SIGNALS
            and snapshot.layout is not DiskLayout.UNKNOWN  # only observed: who knows what the writers fill
            and all(each.usage is None for each in subjects)
        )
        if by_writes:
            order = (ranking.WRITE_RATE, *order)
            look, subjects = look._replace(order=order), _writers(subjects, look)
        rows = _sorted(*_rows_of(look, subjects, standing, by_writes=by_writes))[1]
    own_uid, least = snapshot.own_pod_uid, minimum.relief if minimum is not None else 0
    pods, new = [], tuple.__new__
    for rank, (view, used, request, freed, refusals, values) in enumerate(rows, 1):
        if own_uid and view.pod.uid == own_uid:
            refusals = (protection.OWN_POD, *refusals)  # noqa: PLW2901
        if minimum is not None and not refusals and (freed or 0) < least:
            refusals = (minimum.refusal,)  # noqa: PLW2901
        pods.append(new(RankedPod, (view, rank, (), used, request, freed, refusals, values)))
    return RankedPods(signal, order, pods, by_writes)


class _RankingContext(NamedTuple):
    """What pods are lined up by, in one decision."""

    snapshot: NodeSnapshot
    signal: Signal
    order: tuple[str, ...]
    most: int
    """More than this cannot be in one pod."""
    scene: protection.RuleContext
    asked: protection.Asked
    config: Config
    growth: ranking.GrowthState
    keeps: bool
    """Whether what comes out depends on each pod's object and usage alone, but for the terminating ones."""


def _look_at(
    snapshot: NodeSnapshot, signal: Signal, *, tier: Tier, config: Config, growth: ranking.GrowthState
) -> _RankingContext:
    rules = config.protection
    wishes = bool(rules.trusted_namespaces) and tier is Tier.SOFT and not config.ranking.kubelet
    order = ranking.order_for(config.ranking, signal, snapshot.layout, wishes=wishes)
    scene = protection.RuleContext(rules, tier, SIGNAL_TABLE[signal].resource, snapshot.taken_at, snapshot.wall_time)
    asked = protection.applicable_rules(scene)
    keeps = signal in MEMORY_SIGNALS and not asked and ranking.TIMELESS.issuperset(order)
    return _RankingContext(
        snapshot,
        signal,
        order,
        in_flight.usage_limit(snapshot, signal, config=config),
        scene,
        asked,
        config,
        growth,
        keeps,
    )


# --- an order that is kept -------------------------------------------------------------------------------------------


def _kept(look: _RankingContext, places: list[ranking.SortKey], rows: list[_Row]) -> _Kept | None:
    """The order with what it takes to bring it up to date; None when a usage in it is of no believable time, which the
    next instant may see otherwise, or a pod is in it twice."""
    views = look.snapshot.pods
    by_uid = {row.view.pod.uid: place for place, row in zip(places, rows, strict=True)}
    span = _span(look, views)
    if span is None or len(by_uid) != len(places):
        return None
    terms = _Terms(look.order, look.snapshot.layout, look.most)
    return _Kept(terms, views, places, rows, by_uid, _restless(views), *span)


def _restless(views: Iterable[PodView]) -> frozenset[str]:
    return frozenset([view.pod.uid for view in views if view.pod.deletion_wall is not None])


def _span(look: _RankingContext, views: Iterable[PodView]) -> tuple[float, float] | None:
    """When the first and the last of the usages were read; None unless all are of believable times."""
    oldest, newest = _believed(look)
    times = [view.usage.read_at for view in views if view.usage is not None]
    if not all(oldest <= at <= newest for at in times):
        return None
    return min(times, default=newest), max(times, default=oldest)


def _changed(kept: _Kept, look: _RankingContext) -> list[int] | None:
    """Indices of the pods that have to be reckoned anew; None when that is everybody."""
    pods, restless = look.snapshot.pods, kept.restless
    oldest, newest = _believed(look)
    if kept.terms != (look.order, look.snapshot.layout, look.most) or len(pods) != len(kept.views):
        return None
    if kept.oldest < oldest or kept.newest > newest:
        return None
    changed = [
        index
        for index, (before, view) in enumerate(zip(kept.views, pods, strict=True))
        if before is not view or (restless and view.pod.uid in restless)
    ]
    same = all(kept.views[index].pod.uid == pods[index].pod.uid for index in changed)
    # One pod that is moved costs twice as much this way; of those that changed in a calm turn few are.
    return changed if same and 4 * len(changed) <= 3 * len(pods) else None


def _move(kept: _Kept, places: Sequence[ranking.SortKey], rows: Sequence[_Row]) -> None:
    """Put these pods where they stand now."""
    for place, row in zip(places, rows, strict=True):
        uid = row.view.pod.uid
        before = kept.by_uid[uid]
        at = bisect_left(kept.places, before)
        if place == before:
            kept.rows[at] = row
            continue
        del kept.places[at], kept.rows[at]
        at = bisect_left(kept.places, place)
        kept.places.insert(at, place)
        kept.rows.insert(at, row)
        kept.by_uid[uid] = place


# --- reckoned anew ---------------------------------------------------------------------------------------------------


def _sorted(places: list[ranking.SortKey], rows: list[_Row]) -> tuple[list[ranking.SortKey], list[_Row]]:
    order = sorted(range(len(places)), key=places.__getitem__)
    return [places[index] for index in order], [rows[index] for index in order]


def _rows(
    look: _RankingContext, views: Sequence[PodView], standing: Sequence[PodFacts]
) -> tuple[list[ranking.SortKey], list[_Row]]:
    return _rows_of(look, _subjects(look, views, standing), standing)


def _rows_of(
    look: _RankingContext,
    subjects: Sequence[ranking.RankingInput],
    standing: Sequence[PodFacts],
    *,
    by_writes: bool = False,
) -> tuple[list[ranking.SortKey], list[_Row]]:
    """Where each subject stands, and what is known of it."""
    signal, scene, asked, most, layout = look.signal, look.scene, look.asked, look.most, look.snapshot.layout
    values, places = ranking.standings(subjects, look.order)
    # Children of milliseconds are in the node's count and in no pod's: without them a bomb would bring next to nothing.
    unseen = relief.unseen_pids(look.snapshot) if signal is Signal.PID and not look.config.ranking.kubelet else 0
    rows, new = [], tuple.__new__
    for each, subject, known in zip(values, subjects, standing, strict=True):
        view, pod, used, request = subject[:4]
        freed = (
            None
            if used is None
            else used
            if by_writes
            else relief.predicted_relief(view.usage, signal, layout, most=most)
        )
        if unseen and freed is not None:
            freed += min(unseen, ranking.forked(view.usage))
        refusals = known.refusals + protection.momentary(pod, view.usage, used, scene, asked)
        rows.append(new(_Row, (view, used, request, freed, refusals, each)))
    return places, rows


def _writers(subjects: Sequence[ranking.RankingInput], look: _RankingContext) -> list[ranking.RankingInput]:
    """The subjects with what they have written in place of what they hold, which nobody knows yet."""
    oldest_s, at = look.config.sampling.stale_after_s, look.snapshot.taken_at
    return [
        each._replace(usage=ranking.written_of(each.view.usage, at=at, oldest_s=oldest_s, most=look.most))
        for each in subjects
    ]


def _believed(look: _RankingContext) -> tuple[float, float]:
    """Between these times a usage must have been read."""
    at = look.snapshot.taken_at
    return at - look.config.sampling.stale_after_s, at + MAX_CLOCK_SKEW_S


def _subjects(
    look: _RankingContext, views: Sequence[PodView], standing: Sequence[PodFacts]
) -> list[ranking.RankingInput]:
    """Every pod with its numbers. A usage that is stale, absurd or held against an impossible request is not known."""
    snapshot, signal, order, most = look.snapshot, look.signal, look.order, look.most
    rules, tier, layout = look.scene.rules, look.scene.tier, snapshot.layout
    wall_time, taken_at = snapshot.wall_time, snapshot.taken_at
    oldest, newest = _believed(look)
    growing = ranking.growth_of(look.growth, signal, layout, at=taken_at) if _needs_growth(order) else None
    owners = ranking.siblings(snapshot.pods) if RankingKey.DUPLICATE_ON_NODE in order else None
    wishes, has_request = ranking.WISH in order, SIGNAL_TABLE[signal].unit is Unit.BYTES
    disk = signal in DISK_SIGNALS
    subjects = []
    for view, known in zip(views, standing, strict=True):
        pod, usage = view
        used = None
        if usage is not None and oldest <= usage.read_at <= newest and not known.bad_request:
            used = ranking.usage_of(usage, signal, layout, most=most)
            if used is not None and disk and ranking.disk_is_old(usage, at=taken_at):
                used = None
        subjects.append(
            ranking.RankingInput(
                view,
                pod,
                used,
                known.request if has_request else None,
                protection.eviction_preference(pod, rules, tier=tier) if wishes else 0.0,
                growing(usage, used) if growing is not None else 0.0,
                owners is None or pod.owner is None or owners.get(pod.owner.uid, 0) < 2,
                wall_time,
            )
        )
    return subjects


def _needs_growth(order: tuple[str, ...]) -> bool:
    return RankingKey.GROWTH in order or ranking.PROJECTED_USAGE in order
