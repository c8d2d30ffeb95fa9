"""`nodeagent check` with `protection.nodeFit`: whether another node takes the first pods of the eviction order.

Other nodes are read only while a soft threshold is met or with `--signal`, and with `--watch` every two minutes.
"""

from collections.abc import Callable
from typing import Final

from nodeagent.config.schema import Config
from nodeagent.kube import node_fit
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.transport import Transport
from nodeagent.model import NodeFit, NodeSnapshot, Note, NoteKind, Plan, RefusalCode, SignalState

SUBJECT: Final = NoteKind.NODE_FIT
_OF_NODE_FIT: Final = frozenset({RefusalCode.NO_NODE_FITS})


def is_wanted(plan: Plan, *, config: Config, on_request: bool) -> bool:
    """Whether a report needs to know it."""
    met = any(verdict.state is SignalState.SOFT for verdict in plan.signals)
    return config.protection.node_fit and bool(plan.ranking) and (met or on_request)


class NodeFitCheck:
    """Reads it for reports, and keeps what was read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: of the host that is checked."""
        self._clock = clock
        self._fits: dict[str, NodeFit] = {}

    def read(
        self, plan: Plan, snapshot: NodeSnapshot, transport: Transport | None, *, node_name: str
    ) -> tuple[NodeSnapshot, tuple[Note, ...]]:
        """The snapshot with what was read, and a note for each pod."""
        if transport is None:
            return snapshot, (Note(SUBJECT, "whether another node takes a pod is unknown: no API server"),)
        pods = [
            ranked.view.pod
            for ranked in plan.ranking
            if all(refusal.code in _OF_NODE_FIT for refusal in ranked.refusals)
        ][: node_fit.MAX_PODS]
        now = self._clock()
        kept = {uid: fit for uid, fit in self._fits.items() if now - (fit.read_at or 0.0) < node_fit.REFRESH_S}
        missing = [pod.uid for pod in pods if pod.uid not in kept]
        try:
            read = node_fit.read_fits(transport, node_name, missing, clock=self._clock) if missing else {}
        except ApiError as error:
            return snapshot, (Note(SUBJECT, f"whether another node takes a pod is unknown: {error}"),)
        self._fits = {**kept, **read}
        views = [
            view._replace(pod=view.pod._replace(node_fit=self._fits[view.pod.uid]))
            if view.pod.uid in self._fits
            else view
            for view in snapshot.pods
        ]
        notes = [Note(SUBJECT, f"{pod.key}: {_describe(self._fits[pod.uid])}") for pod in pods]
        return snapshot._replace(pods=tuple(views)), tuple(notes)


def _describe(fit: NodeFit) -> str:
    if fit.trouble:
        return f"whether another node takes it is unknown: {fit.trouble}"
    return f"node {fit.node} takes it" if fit.node else fit.reason
