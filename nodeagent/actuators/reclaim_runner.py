"""Runs what an administrator configured to be tried before pods are evicted: commands, and the removal of old logs.

Promises:

1. Nobody waits: each job has a thread, `finished` only collects what has ended.
2. A command is ended at its deadline with every process of its group, and what it left running is ended when it ends.
   Its group is addressed by the id of its leader while that is not reaped, so that no id can have been reused.
3. Its output is read all the time and only the end of it is kept, so that a chatty command neither blocks nor grows us.
4. A command is no part of the agent: it has its own session, no descriptor and no watchdog of ours, and the OOM killer
   may take it like any process.
"""

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.actuators import pod_logs
from nodeagent.config import write_access
from nodeagent.config.schema import ReclaimAction, ReclaimKind
from nodeagent.config.write_access import WriteAccess
from nodeagent.model import SIGNAL_TABLE, Note, NoteKind, ReclaimOrder, ReclaimOutcome, ReclaimResult
from nodeagent.runtime import workers

_OUTPUT: Final = 2048
"""Bytes of a command's last output that are kept for its message."""
_PIPE: Final = 65536
"""What a pipe holds (pipe(7))."""
_LOOK_S: Final = 0.05
"""How long a command that has closed its output may have ended before it is noticed."""
_ENDS_S: Final = 10.0
"""A job that has not ended so long after its deadline is told as stuck."""
_AT_ONCE: Final = 4
"""Jobs at once; the policy orders one at a time, so that this is only reached when they do not end."""
_OURS: Final = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"})
"""Variables of the service manager that are meant for this process alone."""


class JobResult(NamedTuple):
    """How a job ended."""

    result: ReclaimResult
    message: str


ReclaimJob = Callable[[float], JobResult]
"""Takes time.monotonic() by which it has to end."""


class ReclaimRunner:
    """The jobs of one agent."""

    def __init__(
        self,
        *,
        boottime: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        local_path: Callable[[str], str] = lambda path: path,
    ) -> None:
        """`wake` is called from another thread when a job has ended. `local_path` maps a path of
        the host, for jobs."""
        self.local_path = local_path
        self._closing = threading.Event()
        self._boottime = boottime
        self._wake = wake
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._ended: list[ReclaimOutcome] = []

    def start(self, plan_id: str, name: str, job: ReclaimJob, *, timeout_s: float) -> None:
        """Begin a job. One that cannot be begun has failed: `finished` says so."""
        with self._lock:
            refused = "still running" if name in self._running else ""
            if len(self._running) >= _AT_ONCE:
                refused = f"{_AT_ONCE} others are running"
            if not refused:
                self._running.add(name)
        if refused:
            self._end(plan_id, name, JobResult(ReclaimResult.FAILED, refused))
            return
        until = time.monotonic() + timeout_s
        thread = workers.start_thread(lambda: self._run(plan_id, name, job, until), name=f"reclaim {name}")
        if thread is None:
            self._end(plan_id, name, JobResult(ReclaimResult.FAILED, "there is no PID left for a thread"))
        else:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def closing(self) -> bool:
        """Whether jobs are to end now; may be asked by any thread."""
        return self._closing.is_set()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End what runs, and wait for that as long as this at most."""
        self._closing.set()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def finished(self) -> list[ReclaimOutcome]:
        """What has ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def _run(self, plan_id: str, name: str, job: ReclaimJob, until: float) -> None:
        try:
            with workers.step("its command", limit_s=until - time.monotonic() + _ENDS_S):
                ended = job(until)
        except Exception as error:  # whatever it is, the decision must not wait for it
            ended = JobResult(ReclaimResult.FAILED, f"{type(error).__name__}: {error}")
        self._end(plan_id, name, ended)
        self._wake()

    def _end(self, plan_id: str, name: str, ended: JobResult) -> None:
        with self._lock:
            self._running.discard(name)
            self._ended.append(ReclaimOutcome(plan_id, name, ended.result, ended.message, self._boottime()))


# --- what an order means ---------------------------------------------------------------------------------------------

_BUILT_IN: Final[Mapping[ReclaimKind, tuple[str, ...]]] = {
    ReclaimKind.IMAGES: ("crictl", "rmi", "--prune"),
    ReclaimKind.JOURNAL: ("journalctl", "--vacuum-size=200M"),
}


def build_job(
    action: ReclaimAction,
    order: ReclaimOrder,
    *,
    pod_logs: Callable[[], str],
    ended: Callable[[str], bool],
    stop: Callable[[], bool] = lambda: False,
) -> ReclaimJob:
    """The job that this order for this action means. `pod_logs` gives the directory of pod logs on this machine,
    `ended` tells of a name in it whether that pod has no container any more, `stop` when a command is to end early."""
    if action.kind is ReclaimKind.CONTAINER_LOGS:
        return lambda until: _remove_logs(pod_logs(), ended=ended, until=until)
    facts = SIGNAL_TABLE[order.signal]
    environ = {
        "NODEAGENT_RESOURCE": facts.resource,
        "NODEAGENT_SIGNAL": order.signal.value,
        "NODEAGENT_DEFICIT": str(order.deficit),
        "NODEAGENT_AVAILABLE": str(order.available),
    }
    return command(action.command or _BUILT_IN[action.kind], environ, stop=stop)


def _remove_logs(directory: str, *, ended: Callable[[str], bool], until: float) -> JobResult:
    try:
        removed = pod_logs.remove_old_logs(directory, ended=ended, until=until)
    except OSError as error:
        return JobResult(ReclaimResult.FAILED, f"{directory}: {error.strerror}")
    result = ReclaimResult.DONE if removed.complete else ReclaimResult.TIMED_OUT
    return JobResult(result, f"removed {removed.files} files, {removed.bytes} bytes")


def missing_programs(actions: Iterable[ReclaimAction]) -> tuple[Note, ...]:
    """Which of these actions will fail because their program is not on this machine, as far as we see it, and which
    programs others may change. To be told before they are needed. Looks at the file system."""
    programs = ((action.name, (action.command or _BUILT_IN.get(action.kind, ("",)))[0]) for action in actions)
    notes = []
    for name, program in programs:
        if not program:
            continue
        place = _place_of(program)
        if place is None:
            notes.append(Note(NoteKind.RECLAIM, f"{name} will fail: no program {program} where the agent runs"))
        elif (found := _write_access(place)) is not None:
            text = f"{name} runs {place} as this agent's user, and {found.path} {found.reason}: run `{found.fix}`"
            notes.append(Note(NoteKind.RECLAIM, text))
    return tuple(notes)


def _place_of(program: str) -> str | None:
    """Where a command of this name is, run in `/` as commands are; None when there is none."""
    folders = [""] if "/" in program else os.get_exec_path()
    places = (os.path.join("/", folder, program) for folder in folders)
    return next((place for place in places if os.path.isfile(place) and os.access(place, os.X_OK)), None)


def _write_access(place: str) -> WriteAccess | None:
    try:
        return write_access.find_write_access(place)
    except OSError:
        return None


# --- commands --------------------------------------------------------------------------------------------------------


def command(
    words: tuple[str, ...], environ: Mapping[str, str], *, stop: Callable[[], bool] = lambda: False
) -> ReclaimJob:
    """A job that runs this program with these variables on top of our own."""
    return lambda until: run(words, environ, until=until, stop=stop)


def run(
    words: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    until: float,
    stop: Callable[[], bool] = lambda: False,
) -> JobResult:
    """Run a program until it ends, until time.monotonic() `until`, or until `stop` says so."""
    ours = {name: value for name, value in os.environ.items() if name not in _OURS}
    try:
        process = subprocess.Popen(  # noqa: S603 - words of the administrator's own configuration, without a shell
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**ours, **environ},
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return JobResult(ReclaimResult.FAILED, f"{words[0]}: {reason}")
    _leave_to_the_oom_killer(process.pid)
    assert process.stdout is not None
    with process.stdout:
        output, in_time = _follow(process.pid, process.stdout.fileno(), until, stop)
        _end_group(process.pid)
        code = process.wait()
    said = output.decode("utf-8", "replace").strip()
    if not in_time:
        return JobResult(ReclaimResult.TIMED_OUT, said)
    if code:
        return JobResult(ReclaimResult.FAILED, f"exit code {code}" + (f": {said}" if said else ""))
    return JobResult(ReclaimResult.DONE, said)


def _follow(pid: int, fd: int, until: float, stop: Callable[[], bool]) -> tuple[bytes, bool]:
    """(the end of the output, whether the program ended in time). It is left unreaped."""
    os.set_blocking(fd, False)
    output, open_ = b"", True
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            left_s = until - time.monotonic()
            if open_ and selector.select(max(0.0, min(_LOOK_S, left_s))):
                more = os.read(fd, _PIPE)
                output = (output + more)[-_OUTPUT:]
                if not more:
                    selector.unregister(fd)
                    open_ = False
            elif not open_:
                time.sleep(max(0.0, min(_LOOK_S, left_s)))
            if _has_ended(pid):
                return (output + _left_in(fd))[-_OUTPUT:] if open_ else output, True
            if left_s <= 0 or stop():
                return output, False


def _left_in(fd: int) -> bytes:
    """What a program that has ended left in its pipe. One read is all that a pipe holds; whatever it left running may
    write on for ever."""
    try:
        return os.read(fd, _PIPE)
    except BlockingIOError:
        return b""


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # nobody is left in it
    except PermissionError:
        return  # only processes that have changed their user are, and we may not touch them


def _leave_to_the_oom_killer(pid: int) -> None:
    """A command inherits the agent's protection from the OOM killer and must not keep it."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
            file.write("0")
    except OSError:
        return  # it has ended already, or the kernel does not let us: it is short-lived either way
