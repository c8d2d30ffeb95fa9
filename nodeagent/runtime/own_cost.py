"""Measures what the agent costs the node, and limits it.

Promises:

1. `assess_cost` is pure: two readings and the limits give a verdict. CPU above its limit makes the sampling interval
   longer, and less CPU makes it shorter again. Resident memory above its limit is trimmed. A note reports either.
2. The longer interval applies in calm times only. Near a threshold the loop samples as fast as necessary.
3. The agent has its own descriptor limit below that of the host: a descriptor leak of the agent ends in an error here,
   not in a node without free descriptors.
"""

import ctypes
import gc
import resource
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind

READ_EVERY_S: Final = 30.0
"""A reading takes 0.2 ms; a CPU share over a few seconds has little meaning."""
MAX_DESCRIPTORS: Final = 4096
"""Two open files for each of 1,000 pods, and as many for all other uses. Each takes 4.3 KiB of kernel memory."""
MAX_INTERVAL_FACTOR: Final = 10.0
"""With the default interval of 1 s a calm node is then sampled every 10 s, as often as by the kubelet."""
MAX_INTERVAL_S: Final = 10.0
"""No interval becomes longer than this, so that the probes do not report the agent as stuck."""
_DESCRIPTORS_NOTED: Final = 0.8
"""Share of the descriptor limit above which a note reports it."""
_MAX_FAULTS_PER_S: Final = 10.0
"""Major page faults. Each is a read from disk, which takes ms under disk pressure. A locked process has none."""


class CostError(Exception):
    """The cost cannot be read, as without free descriptors or memory. The message has the reason."""


class ProcessCost(NamedTuple):
    """One reading of this process. Counters start with the process."""

    read_at: float
    rss: int
    """Resident set in bytes, including shared pages."""
    cpu_s: float
    """User and system time of all threads."""
    threads: int
    descriptors: int
    descriptor_limit: int
    major_faults: int
    minor_faults: int
    voluntary_switches: int
    """A thread slept or waited: about one for each wake-up."""
    involuntary_switches: int
    """The scheduler preempted a thread."""


class CostLimits(NamedTuple):
    """The most that the agent may cost."""

    cpu_share: float = 0.03
    """Of one core, between two readings. Measured with benchmarks/loop.py --rss and forks.py, at 1 Hz: 0.3% with 110
    pods, 0.8% with 500, 2.2% in a fork storm of 23,000/s."""
    rss: int = 64 << 20
    """Bytes. The goal is 40 MiB with 110 pods and 45 with 500; the limit in the manifests is higher than this."""


class CostVerdict(NamedTuple):
    """The result of a reading."""

    cpu_share: float | None
    """Of one core since the previous reading; None for the first one, and if no time passed."""
    interval_factor: float
    """For `longer_interval`, 1 to `MAX_INTERVAL_FACTOR`."""
    trim: bool
    """Call `trim_memory`."""
    notes: tuple[Note, ...]


def read_cost(now: float) -> ProcessCost:
    """Read this process. For the loop's thread only: psutil's /proc is a global variable, which
    `sampling.hostfs.processes` changes during its calls. Raises CostError."""
    import psutil

    try:
        process = psutil.Process()
        with process.oneshot():
            times, switches = process.cpu_times(), process.num_ctx_switches()
            rss, threads = process.memory_info().rss, process.num_threads()
        descriptors = process.num_fds()
    except (OSError, psutil.Error) as error:
        raise CostError(f"the agent's own cost is unknown: {error}") from error
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessCost(
        read_at=now,
        rss=rss,
        cpu_s=times.user + times.system,
        threads=threads,
        descriptors=descriptors,
        descriptor_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        major_faults=usage.ru_majflt,
        minor_faults=usage.ru_minflt,
        voluntary_switches=switches.voluntary,
        involuntary_switches=switches.involuntary,
    )


def unread_note(error: CostError) -> Note:
    """For the time without a reading."""
    return _note(str(error))


def longer_interval(interval_s: float, factor: float, *, stale_after_s: float) -> float:
    """The calm sampling interval in seconds after multiplication: no sample becomes stale before the next one."""
    return max(interval_s, min(interval_s * factor, MAX_INTERVAL_S, stale_after_s / 2))


def assess_cost(
    before: ProcessCost | None, after: ProcessCost, limits: CostLimits, *, interval_factor: float = 1.0
) -> CostVerdict:
    """The verdict after a reading. `before` is the previous reading, None for the first; `interval_factor` applied
    between the two.

    A sample costs the same at any interval. With CPU share c and factor f the share without a factor is c * f, and the
    factor c * f / limit keeps the limit.
    """
    factor = interval_factor
    passed = after.read_at - before.read_at if before is not None else 0.0
    share = None
    notes: list[Note] = []
    if before is not None and passed > 0:
        share = max(0.0, after.cpu_s - before.cpu_s) / passed
        factor = min(MAX_INTERVAL_FACTOR, max(1.0, share * factor / limits.cpu_share))
        if share > limits.cpu_share:
            notes.append(_note(f"CPU {share:.1%} of a core, limit {limits.cpu_share:.1%}: calm interval "
                               f"{factor:.1f} times as long"))  # fmt: skip
        faults = after.major_faults - before.major_faults
        if faults > _MAX_FAULTS_PER_S * passed:
            notes.append(_note(f"{faults} pages of the agent read from disk in {passed:.0f}s, which delays decisions; "
                               "allow it to lock its memory (CAP_IPC_LOCK)"))  # fmt: skip
    if after.rss > limits.rss:
        notes.append(_note(f"memory {after.rss / 2**20:.0f} MiB resident, limit {limits.rss / 2**20:.0f} MiB"))
    if after.descriptor_limit >= 0 and after.descriptors > _DESCRIPTORS_NOTED * after.descriptor_limit:
        notes.append(_note(f"{after.descriptors} descriptors open, limit {after.descriptor_limit}"))
    return CostVerdict(share, factor, after.rss > limits.rss, tuple(notes))


def trim_memory() -> None:
    """Collect garbage and return free memory to the kernel. Takes several ms: do not call it under pressure."""
    gc.collect()
    trimmed = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trimmed is not None:
        trimmed(0)


def limit_descriptors(wanted: int = MAX_DESCRIPTORS) -> tuple[int, tuple[Note, ...]]:
    """Set the descriptor limit of this process, before it opens files. Returns the actual limit, and a note if the host
    allows fewer than `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        return limit, (_note(f"descriptor limit is {limit} instead of {wanted} (LimitNOFILE=, ulimit -n): with many "
                             "pods fewer files stay open, and a sample takes longer"),)  # fmt: skip
    return limit, ()


def _note(message: str) -> Note:
    return Note(NoteKind.COST, message)
