"""Say who forks in a fork storm."""

from collections.abc import Iterable, Mapping
from typing import Final

from nodeagent.model import Note, NoteKind, PodView
from nodeagent.sampling.events import fork_attribution, fork_meter
from nodeagent.sampling.hostfs import processes

_OTHERS: Final = {processes.HOST: "the host", fork_attribution.UNKNOWN_POD: "unknown pods"}


def note(rates: Mapping[str, float], pods: Iterable[PodView]) -> Note:
    """Who has the largest number of new processes and threads (`ForkMeter.rates`). Rates and shares differ each time,
    and are not said: a lasting storm is one line of the log."""
    busiest = max(rates, key=rates.__getitem__, default=fork_attribution.UNKNOWN_POD)
    names = {each.usage.cgroup_uid: each.pod.key for each in pods if each.usage is not None}
    who = names.get(busiest) or _OTHERS.get(busiest) or f"uid/{busiest}"
    storm = f"more than {fork_meter.STORM_PER_S:.0f} new processes and threads a second"
    return Note(NoteKind.FORKS, f"fork storm: {storm}, the largest number in {who}")
