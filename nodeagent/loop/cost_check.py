"""Checks in every sync what the agent itself costs the node: spare descriptors, and now and then CPU and memory."""

from nodeagent.model import Note
from nodeagent.runtime import own_cost
from nodeagent.runtime.own_cost import CostVerdict, ProcessCost
from nodeagent.runtime.self_protection import SpareDescriptors


class CostCheck:
    """The spare descriptors and the last reading."""

    def __init__(self) -> None:
        self._spare = SpareDescriptors()
        self._last: ProcessCost | None = None

    def check(self, now: float, *, interval_factor: float) -> CostVerdict:
        """Spare descriptors always, CPU and memory every `own_cost.READ_EVERY_S`; the factor stays in between. `now`:
        CLOCK_BOOTTIME."""
        trouble = self._spare.check()
        verdict = CostVerdict(None, interval_factor, trim=False, notes=())
        if self._last is None or now - self._last.read_at >= own_cost.READ_EVERY_S:
            verdict = self._assess(now, verdict)
        if verdict.trim:
            own_cost.trim_memory()
        notes: tuple[Note, ...] = (trouble,) if trouble else ()
        return verdict._replace(notes=notes + verdict.notes)

    def _assess(self, now: float, unread: CostVerdict) -> CostVerdict:
        """Without a reading the next sync tries again: a node without free descriptors needs its syncs."""
        before, self._last = self._last, None
        try:
            self._last = own_cost.read_cost(now)
        except own_cost.CostError as error:
            return unread._replace(notes=(own_cost.unread_note(error),))
        return own_cost.assess_cost(before, self._last, own_cost.CostLimits(), interval_factor=unread.interval_factor)
