"""Watches the memory limits of the pods of `ownLimit` between decisions, so that one near its limit gets a decision.

Promises:

1. Nothing is read unless `ownLimit` is on, and then only files of pods that opted in (`sampling.pods.own_limits`).
2. It decides nothing: it reports when a decision is due and when to read next. The policy judges the readings that it
   adds to the snapshot, and judges them again in the recheck.
3. A pod that stays near its limit because it must not be evicted makes no decision urgent, only more frequent.

Theory of operation. The pods are those of the last full sample. Each reading extends the history of its limit, from
which the policy takes the trend. The next reading is due in a share of the time in which the fastest of the pods could
be near its limit.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import OwnLimit, PodUsage, PodView
from nodeagent.policy import own_limits, trend
from nodeagent.sampling.pods import own_limits as limit_readings
from nodeagent.sampling.sampler import Sampler

SAFETY: Final = 0.25
"""A trend needs four readings: the next one is due in this share of the time that is left."""
SHORTEST_S: Final = 0.2
"""Closer readings replace one another in the history (`trend.SPACING_S`)."""
STEADY_S: Final = 0.5
"""A pod that does not grow is read no more often, however near it is."""
FASTEST: Final = 64 << 20
"""Bytes a second that a pod is expected to grow by at any time. 50 MiB/s fills 512 MiB in 10 s."""


class WatchResult(NamedTuple):
    """What one reading asks of the loop."""

    near: frozenset[str] = frozenset()
    """UIDs of the pods near a limit of their own."""
    next_s: float = float("inf")
    """When to read again."""


@dataclass(slots=True)
class _Track:
    """The readings of one limit so far."""

    since: float
    """When it was read for the first time."""
    history: trend.History = ()
    peak: int = 0
    reclaims: int | None = None
    reclaimed_at: float = float("-inf")


@dataclass(slots=True)
class _Pod:
    """One pod, as it was read last."""

    raw: tuple[OwnLimit, ...]
    """As it was read: the same object again adds nothing."""
    limits: tuple[OwnLimit, ...]
    """The same with their histories."""
    next_s: float
    tracks: dict[tuple[str, int], _Track]
    """By container (all of them for the limit of the pod) and limit: a resize and a restart begin a new history."""


class OwnLimitWatch:
    """The own limits of the pods of one agent."""

    def __init__(self) -> None:
        self._views: Sequence[PodView] = ()
        """Of the last full sample: the pods that opted in."""
        self._pods: dict[str, _Pod] = {}
        """By UID of the cgroup."""
        self.limits: Mapping[str, tuple[OwnLimit, ...]] = {}
        """The newest readings, by UID of the cgroup."""

    def set_targets(self, views: Sequence[PodView], config: Config) -> None:
        """Watch those of these pods that opted in."""
        if not config.own_limit.enabled:
            self.reset()
            return
        self._views = [
            view
            for view in views
            if view.usage is not None and not view.pod.terminating and own_limits.watched(view.pod, config)
        ]

    def reset(self) -> None:
        """Forget everything: `ownLimit` is off, or the configuration has changed."""
        self._views, self._pods, self.limits = (), {}, {}

    def read(self, sampler: Sampler, *, now: float, config: Config, fresh: Collection[str] = ()) -> WatchResult:
        """Read the limits now. `fresh`: UIDs of cgroups that are read however little they moved."""
        if not self._views:
            self.limits = {}
            return WatchResult()
        usages: list[PodUsage] = [view.usage for view in self._views if view.usage is not None]
        found = sampler.read_own_limits(usages, now=now, fresh=fresh)
        before = self._pods
        self._pods = {
            usage.cgroup_uid: _extended(usage, raw, before.get(usage.cgroup_uid), config)
            for usage in usages
            if (raw := found.get(usage.cgroup_uid))
        }
        self.limits = {uid: pod.limits for uid, pod in self._pods.items()}
        views = [
            view._replace(usage=view.usage._replace(own_limits=limits))
            for view in self._views
            if view.usage is not None and (limits := self._filled(view.usage.cgroup_uid))
        ]
        near = own_limits.near_limits(views, at=now, config=config)
        next_s = min([pod.next_s for pod in self._pods.values()], default=float("inf"))
        return WatchResult(frozenset([each.view.pod.uid for each in near]), next_s)

    def _filled(self, uid: str) -> tuple[OwnLimit, ...]:
        """The limits of a pod that it may be near."""
        limits = self.limits.get(uid, ())
        return limits if any(own.used >= limit_readings.DETAIL_SHARE * own.limit for own in limits) else ()


def _extended(usage: PodUsage, raw: tuple[OwnLimit, ...], before: _Pod | None, config: Config) -> _Pod:
    """The readings of a pod with what earlier ones add to them."""
    if before is not None and before.raw is raw:
        return before
    tracks: dict[tuple[str, int], _Track] = {}
    limits = []
    for own in raw:
        key = (own.container_id or ",".join([each.container_id for each in usage.containers]), own.limit)
        track = tracks[key] = (before.tracks.get(key) if before is not None else None) or _Track(own.read_at)
        limits.append(_with_history(own, track))
    return _Pod(raw, tuple(limits), min([_next_s(own, config) for own in limits]), tracks)


def _with_history(own: OwnLimit, track: _Track) -> OwnLimit:
    history = trend.extend(track.history, read_at=own.read_at, available=own.headroom)
    if history is not track.history:
        left = [own.limit - headroom for at, headroom in track.history if at < history[0][0]]
        track.peak = max(track.peak, *left, 0)
        if own.reclaims is not None:
            if track.reclaims is not None and own.reclaims > track.reclaims:
                track.reclaimed_at = own.read_at
            track.reclaims = own.reclaims
        track.history = history
    lately = track.reclaimed_at >= history[0][0]
    return own._replace(history=history, peak=track.peak, watched_since=track.since, reclaimed_lately=lately)


def _next_s(own: OwnLimit, config: Config) -> float:
    """When the limit is read again: before the pod could be near it, at its growth now and at `FASTEST`. Where the
    trend counts, a pod that grows is read as often as the history takes readings."""
    counts_from = round(config.own_limit.trend_above * own.limit)
    left = own.headroom - (own.limit - counts_from)
    rate = -(trend.latest_rate(own.history) or 0.0)
    if left > 0:
        soon_s = max(STEADY_S, SAFETY * left / FASTEST)
        return min(soon_s, max(SHORTEST_S, SAFETY * left / rate)) if rate > 0 else soon_s
    grows = rate > 0 and own.headroom < 60.0 * rate
    return SHORTEST_S if grows else float("inf")
