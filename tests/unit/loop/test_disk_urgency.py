"""A disk that only images fill is walked in no hurry."""

from nodeagent.loop import observe
from nodeagent.loop.schedule import Schedule
from nodeagent.model import Signal
from nodeagent.sampling.disk.monitor import DiskUrgency

IMAGEFS, NODEFS = frozenset({Signal.IMAGEFS}), frozenset({Signal.NODEFS})


def test_only_what_is_crossed_now_and_was_full_of_images_is_in_no_hurry() -> None:
    due = Schedule(1.0, True, True, {}, crossed=IMAGEFS | NODEFS, near=frozenset({Signal.NODEFS_INODES}))
    near = due.near
    assert observe.disk_urgency(due, IMAGEFS) == DiskUrgency(crossed=NODEFS, near=near, full_of_images=IMAGEFS)
    assert observe.disk_urgency(due, frozenset()) == DiskUrgency(crossed=IMAGEFS | NODEFS, near=near)
    recovered = due._replace(crossed=frozenset())
    assert observe.disk_urgency(recovered, IMAGEFS) == DiskUrgency(near=near)
