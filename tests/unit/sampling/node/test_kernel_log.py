"""OOM kills in the kernel log: as kernels write them, and as a tenant or a program would forge them."""

from pathlib import Path

import pytest

from nodeagent.model import LoggedKill, OomLevel, OomPlace
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import kernel_log, oom_counters
from nodeagent.sampling.node.kernel_log import KernelLog, LogRecord, OomLogParser

UID = "12345678-1234-1234-1234-123456789abc"
POD = f"/kubepods/burstable/pod{UID}"
CONTAINER = f"{POD}/{'a' * 64}"
PLACE = OomPlace(CONTAINER, OomLevel.CONTAINER, UID, "a" * 64)
LIMIT = (
    f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset={'a' * 64},mems_allowed=0,oom_memcg={CONTAINER},"
    f"task_memcg={CONTAINER},task=python3,pid=4711,uid=0"
)
NODE = (
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
    f"task_memcg={CONTAINER},task=stress,pid=99,uid=1000"
)
KILLED = (
    "Memory cgroup out of memory: Killed process 4711 (python3) total-vm:80000kB, anon-rss:65000kB, file-rss:500kB, "
    "shmem-rss:4kB, UID:0 pgtables:180kB oom_score_adj:1000"
)
GROUP = f"Tasks in {CONTAINER} are going to be killed due to memory.oom.group set"


def parse(*texts: str, parser: OomLogParser | None = None) -> list[LoggedKill]:
    records = [LogRecord(number, number / 10, text) for number, text in enumerate(texts, start=1)]
    return (parser or OomLogParser()).parse(records, lambda path: oom_counters.place_of(path, "/kubepods"))


def test_a_kill_by_the_limit_of_a_container() -> None:
    resident = (65000 + 500 + 4) * 1024
    assert parse(LIMIT, KILLED) == [LoggedKill(1, 0.1, 4711, "python3", resident, PLACE, PLACE)]


def test_a_kill_for_the_node_has_no_limit() -> None:
    [kill] = parse(NODE)
    assert (kill.place, kill.limit, kill.numa, kill.name) == (PLACE, None, False, "stress")


def test_exhausted_numa_nodes_are_not_the_whole_node() -> None:
    [kill] = parse(NODE.replace("CONSTRAINT_NONE", "CONSTRAINT_MEMORY_POLICY"))
    assert kill.numa


def test_a_group_kill_has_all_processes_in_the_cgroup() -> None:
    child = KILLED.replace("4711 (python3)", "4712 (sh)")
    kills = parse(LIMIT, KILLED, GROUP, KILLED, child)
    assert [(kill.pid, kill.name, kill.place, kill.limit) for kill in kills] == [
        (4711, "python3", PLACE, PLACE),
        (4712, "sh", PLACE, PLACE),
    ]


def test_a_kill_without_its_first_line_has_no_place() -> None:
    [kill] = parse(KILLED)
    assert (kill.pid, kill.place) == (4711, None)


def test_a_command_with_commas_ends_at_its_pid() -> None:
    [kill] = parse(LIMIT.replace("task=python3", "task=a,pid=1,uid=0"))
    assert (kill.pid, kill.name) == (4711, "a,pid=1,uid=0")


def test_a_cgroup_that_a_container_named_like_a_line_stays_within_its_container() -> None:
    forged = f"{CONTAINER}/x,task_memcg=/kubepods/burstable/pod{'0' * 8}-0000-0000-0000-{'0' * 12}"
    assert parse(LIMIT.replace(f"oom_memcg={CONTAINER}", f"oom_memcg={forged}")) == []
    [kill] = parse(NODE.replace(f"task_memcg={CONTAINER}", f"task_memcg={forged}"))
    assert kill.place == PLACE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "oom-kill:",
        "oom-kill:constraint=CONSTRAINT_NONE",
        LIMIT.replace("pid=4711", "pid=x"),
        LIMIT.replace("pid=4711", "pid=" + "9" * 40),
        LIMIT.replace("CONSTRAINT_MEMCG", "CONSTRAINT_NONE"),
        NODE.replace("CONSTRAINT_NONE", "CONSTRAINT_MEMCG"),
        LIMIT.replace(f"oom_memcg={CONTAINER}", "oom_memcg=/system.slice/x.service"),
        "Killed process 1 (init)",
        "Out of memory" + "x" * 100000,
        "oom-kill:constraint=" + "A" * 100000,
    ],
)
def test_a_malformed_line_is_no_kill(text: str) -> None:
    assert parse(text) == []


def test_the_records_of_one_kill_may_come_in_two_readings() -> None:
    parser = OomLogParser()
    assert len(parse(LIMIT, GROUP, parser=parser)) == 1
    [kill] = parse(KILLED.replace("4711 (python3)", "4712 (sh)"), parser=parser)
    assert (kill.place, kill.limit) == (PLACE, PLACE)


def test_a_record_of_the_kernel_is_read() -> None:
    assert kernel_log.parse_record(b"6,339,5140900,-;text here\n SUBSYSTEM=x\n") == LogRecord(339, 5.1409, "text here")


@pytest.mark.parametrize(
    "data",
    [
        b"14,339,5140900,-;" + LIMIT.encode(),  # facility 1: written by a process
        b"6,339;x",
        b"6,339,5140900,-",
        b"-6,339,5,-;x",
        b"6,x,5,-;x",
        b"",
        b";;;;",
        b"6," + b"9" * 400 + b",5,-;x",
    ],
)
def test_a_forged_or_malformed_record_is_dropped(data: bytes) -> None:
    assert kernel_log.parse_record(data) is None


def test_what_is_not_the_kernel_log_is_not_read(tmp_path: Path) -> None:
    """A container's /dev, or a recording, may have any file there; this machine's own log is used if it is readable."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_bytes(b"6,1,1,-;" + LIMIT.encode())
    log = KernelLog(Host(str(tmp_path)))
    assert all(CONTAINER not in record.text for record in log.read(1.0))
    log.close()
