"""Decide whether a shortage of inodes is one of bytes.

XFS, ZFS and F2FS make inodes out of free space: the last bytes take the last inodes with them, although few are used. A
pod with many small files would then be evicted for another one that filled the disk, and the disk would stay full.

So no pod is evicted for inodes while there is a free inode for each free block and a threshold of the same file
system's bytes is met, of the same tier or the hard one: bytes run out first, whatever the size of the files, and the
threshold of bytes finds the pod. Once there are more free blocks than inodes, inodes count again. This holds for every
file system; with a fixed number of inodes (ext4) both are rarely short at once.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from nodeagent.model import BYTES_OF_INODES, RefusalCode, Signal, SignalVerdict, ThresholdVerdict, units

BLOCK_BYTES: Final = 4096
"""The usual block. What else a new file costs (directories, a second block) makes bytes run out sooner."""


def without_byte_shortage(judged: Sequence[SignalVerdict]) -> tuple[SignalVerdict, ...]:
    """The verdicts; a threshold of inodes that is due while bytes run out first is not."""
    by_signal = {verdict.signal: verdict for verdict in judged}
    return tuple([_without_byte_shortage(verdict, by_signal) for verdict in judged])


def _without_byte_shortage(verdict: SignalVerdict, by_signal: Mapping[Signal, SignalVerdict]) -> SignalVerdict:
    signal = BYTES_OF_INODES.get(verdict.signal)
    if signal is None or not any(each.due for each in verdict.thresholds):
        return verdict
    of_bytes = by_signal[signal]
    free_bytes, free_inodes = of_bytes.observation.available, verdict.observation.available
    if free_bytes is None or free_inodes is None or free_inodes * BLOCK_BYTES < free_bytes:
        return verdict
    reason = (
        f"{verdict.signal.value}: {free_inodes} are left for {units.format_amount(free_bytes)} of free space, one for "
        f"each block of {units.format_amount(BLOCK_BYTES)} and more: bytes run out first, and {signal.value} is below "
        "a threshold"
    )
    met = [each for each in of_bytes.thresholds if each.met]

    def waits(inodes: ThresholdVerdict) -> bool:
        return inodes.due and any(each.threshold.hard or not inodes.threshold.hard for each in met)

    return verdict._replace(
        thresholds=tuple(
            [
                each._replace(due=False, not_due_reason=reason, not_due_code=RefusalCode.BYTES_FIRST)
                if waits(each)
                else each
                for each in verdict.thresholds
            ]
        )
    )
