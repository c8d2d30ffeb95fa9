"""The texts about an eviction for the owner of the pod."""

import pytest

from nodeagent.model import Method, Signal, Tier, Victim
from nodeagent.policy import owner_messages
from tests.support.nodes import GI, MI, hard, pod


@pytest.mark.parametrize(
    ("signal", "usage", "request_", "text"),
    [
        (Signal.MEMORY, 3 * GI, GI, "It used 3Gi of memory, 2Gi more than its request of 1Gi."),
        (Signal.MEMORY, 512 * MI, GI, "It used 512Mi of memory, which is within its request of 1Gi."),
        (Signal.MEMORY, 3 * GI, 0, "It used 3Gi of memory and requests none."),
        (Signal.MEMORY, 3 * GI, None, "It used 3Gi of memory."),
        (Signal.NODEFS, 3 * GI, GI, "It used 3Gi of disk space, 2Gi more than its request of 1Gi."),
        (Signal.NODEFS_INODES, 70_000, None, "It used 70000 files (inodes)."),
        (Signal.PID, 900, None, "It used 900 PIDs (processes and threads)."),
        (Signal.MEMORY, None, GI, "How much of the node's memory it used is not known."),
    ],
)
def test_usage_is_compared_with_the_request(signal: Signal, usage: int | None, request_: int | None, text: str) -> None:
    assert owner_messages.usage_text(usage, request_, signal) == text


def victim(**more: object) -> Victim:
    made = Victim(pod("web-1"), "/kubepods/podu", hard(), Tier.HARD, Method.EVICT, 1.0, "low ", {}, None)
    return made._replace(**more)  # type: ignore[arg-type]


def test_a_kill_is_called_a_kill() -> None:
    note = owner_messages.eviction_note(victim(method=Method.KILL), None, node="n1")
    assert note == "Pod web-1 was killed on node n1 because the node was low on memory."


def test_a_pod_over_a_limit_of_its_own_is_not_blamed_on_the_node() -> None:
    note = owner_messages.eviction_note(victim(limit="emptydirfs.limit", message="Volume v is full. "), None, node="n1")
    assert note == "Pod web-1 was evicted from node n1 because it exceeded a limit of its own. Volume v is full."


def test_the_end_of_a_hook_is_told_and_its_output_is_not() -> None:
    note = owner_messages.eviction_note(victim(hook="failed after 2s"), None, node="n1")
    assert note.endswith("because the node was low on memory. Hook before the eviction: failed after 2s.")


def test_a_pod_near_its_memory_limit_reads_why_it_was_evicted_before_the_kill() -> None:
    message = (
        "Container app was using 480Mi of its memory limit 512Mi, has 10Mi left; evicted before the kernel kills it. "
    )
    note = owner_messages.eviction_note(victim(limit="memory.max", message=message), None, node="n1")
    assert note == (
        "Pod web-1 was evicted from node n1 because it was about to reach a memory limit of its own, not for the node. "
        f"{message.strip()}"
    )
