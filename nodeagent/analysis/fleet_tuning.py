"""The candidates of several nodes as one table.

Promises:

1. Episodes, exhaustions and evictions belong to their node: what happens to one node answers no alarm of another one.
2. Counts are sums, times below a value too. Amounts are those of the node with the lowest sample.
"""

from collections.abc import Sequence

from nodeagent.analysis import tuning
from nodeagent.analysis.tuning import Candidate, SignalTuning, Tuning


def combined(found: Sequence[Tuning]) -> Tuning:
    """The result over all nodes, of Tuners with the same configuration."""
    if len(found) == 1:
        return found[0]
    by_signal = {
        signal: [each for one in found for each in one.signals if each.signal is signal] for signal in tuning.TUNED
    }
    begun = [each.first_wall for each in found if each.first_wall is not None]
    ended = [each.last_wall for each in found if each.last_wall is not None]
    return Tuning(
        tuple([_signal(parts) for parts in by_signal.values() if parts]),
        min(begun, default=None),
        max(ended, default=None),
        sum([each.recorded_s for each in found]),
        tuple([signal for signal, parts in by_signal.items() if not parts]),
    )


def _signal(parts: Sequence[SignalTuning]) -> SignalTuning:
    lowest = min(parts, key=lambda each: each.lowest)
    exhaustions = tuple(sorted([event for each in parts for event in each.exhaustions]))
    acts = tuple(sorted([event for each in parts for event in each.acts]))
    candidates = tuple(
        [
            _candidate(at_lowest, same)
            for at_lowest, *same in zip(lowest.candidates, *[each.candidates for each in parts], strict=True)
        ]
    )
    hard, soft, reason = tuning.proposed(candidates, exhaustions, acts)
    return lowest._replace(
        samples=sum([each.samples for each in parts]),
        exhaustions=exhaustions,
        acts=acts,
        candidates=candidates,
        hard=hard,
        soft=soft,
        reason=reason,
    )


def _candidate(at_lowest: Candidate, same: Sequence[Candidate]) -> Candidate:
    """The candidate over all nodes; `at_lowest` has its amount."""
    missed = [each.missed for each in same if each.missed is not None]
    return at_lowest._replace(
        alarms=sum([each.alarms for each in same]),
        caught=sum([each.caught for each in same]),
        missed=sum(missed) if missed else None,
        false_alarms=sum([each.false_alarms for each in same]),
        answered=sum([each.answered for each in same]),
        open=sum([each.open for each in same]),
        lead_s=tuple(sorted([lead_s for each in same for lead_s in each.lead_s])),
        met_s=sum([each.met_s for each in same]),
    )
