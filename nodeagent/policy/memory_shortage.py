"""Tell a real shortage of memory from page cache.

Two figures describe the available memory of the node, and of all pods: the kubelet's (the working-set figure), for
which active page cache is used memory and kernel memory is none, and the kernel's (MemAvailable; for the pods the same
sum over their cgroup), which counts both as they are. A threshold with `MemoryModel.LOWER` is met by whichever is
lower, because either ends in an eviction: the kernel's in the OOM killer, the kubelet's in the kubelet.

What we evict for is decided by `counted`: the working-set figure, but at most the kernel's, and at least the kernel's
less half of the threshold or `MOST_DOUBT`, the smaller of the two. So

* the kernel's figure below the threshold is a shortage, whatever the other figure is (slab, page tables, zram and huge
  pages are in no working set);
* the working-set figure below the threshold is one only while the kernel's is not that much above the threshold. From
  there on it is page cache alone, which the kernel drops when memory is needed: no pod is evicted for it;
* the deficit, the threshold less `counted`, is what ends the shortage by the nearer of the two.

Without the kernel's figure nothing is counted, because whether it is page cache is unknown; without the working-set
figure the kernel's decides alone.
"""

from collections.abc import Iterable
from typing import Final

from nodeagent.model import (
    MEMORY_SIGNALS,
    MemoryFigures,
    MemoryModel,
    NodeSnapshot,
    Note,
    NoteKind,
    Refusal,
    RefusalCode,
    Signal,
    Threshold,
    units,
)

MOST_DOUBT: Final = 256 << 20
"""How far MemAvailable is doubted at most, in bytes. Where a kubelet raises our thresholds (`aboveKubelet`), half of
them may be a quarter of the machine, and pods would be evicted for page cache while more than half of it is
available."""


def uses_both(threshold: Threshold) -> bool:
    """Whether the threshold is met by the lower of both figures."""
    return threshold.memory_model is MemoryModel.LOWER and threshold.signal in MEMORY_SIGNALS


def release_model(threshold: Threshold) -> MemoryModel:
    """The memory model by which losses and releases are measured. The memory of an evicted pod appears in the kernel's
    figure at once; in the working-set figure the page cache of other pods may take its place."""
    return MemoryModel.MEM_AVAILABLE if uses_both(threshold) else threshold.memory_model


def available(snapshot: NodeSnapshot, threshold: Threshold, *, level: int) -> int | None:
    """The available amount that an eviction for this threshold counts, at its value or value and minimum reclaim.
    None: unknown."""
    if uses_both(threshold):
        return counted(snapshot.memory_figures(threshold.signal), level=level)
    return snapshot.observe(threshold.signal, threshold.memory_model).available


def counted(figures: MemoryFigures, *, level: int) -> int | None:
    """The available memory that an eviction for this level counts; below the level more than page cache is short. None:
    unknown, because the kernel's figure is."""
    working_set, by_kernel = figures
    if by_kernel is None or working_set is None:
        return by_kernel
    # Rounded up: exactly 1.5 times the level is page cache only.
    return max(min(working_set, by_kernel), by_kernel - min((level + 1) // 2, MOST_DOUBT))


def figures_text(signal: Signal, figures: MemoryFigures) -> str:
    """Both figures: `150Mi by working set, 3.2Gi by MemAvailable`."""
    working_set, by_kernel = figures
    return (
        f"{units.format_amount(working_set)} by working set, {units.format_amount(by_kernel)} {_KERNEL_FIGURE[signal]}"
    )


_KERNEL_FIGURE: Final = {Signal.MEMORY: "by MemAvailable", Signal.ALLOCATABLE_MEMORY: "without page cache"}


def notes(snapshot: NodeSnapshot, thresholds: Iterable[Threshold]) -> tuple[Note, ...]:
    """What it means that the kernel's figure of a threshold that uses both is unknown while the other is known."""
    found: dict[Signal, Note] = {}
    for threshold in thresholds:
        signal = threshold.signal
        if not uses_both(threshold) or signal in found:
            continue
        figures = snapshot.memory_figures(signal)
        if figures.by_kernel is None and figures.working_set is not None:
            reason = snapshot.observe(signal, MemoryModel.MEM_AVAILABLE).implausible
            text = f"{signal.value} by the kernel is unknown ({reason}): no pod is evicted for the working set alone"
            found[signal] = Note(NoteKind.MEMORY, text)
    return tuple(found.values())


def page_cache_refusal(signal: Signal, figures: MemoryFigures, *, level: int) -> Refusal | None:
    """Why no pod is evicted although the lower figure is below this level; None if more than page cache is short."""
    amount = counted(figures, level=level)
    if amount is not None and amount < level:
        return None
    numbers = f"{figures_text(signal, figures)}, threshold {units.format_amount(level)}"
    if amount is None:
        message = f"{signal.value}: unknown whether more than page cache is short: {numbers}"
        return Refusal(RefusalCode.PAGE_CACHE_UNKNOWN, message)
    return Refusal(RefusalCode.PAGE_CACHE_ONLY, f"{signal.value}: no more than page cache is short: {numbers}")
