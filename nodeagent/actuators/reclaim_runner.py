"""Runs the configured reclaim actions, which precede evictions: commands, and the removal of unused images and old
logs. The jobs of hooks (`eviction_hook_jobs`) run in a runner of their own.

Promises:

1. No call waits: each job has its own thread, and `finished` only collects results.
2. A command is killed at its deadline, with every process of its group; processes that it left running are killed when
   it ends. The group is addressed by the id of its leader before that is reaped, so the id cannot have been reused.
3. The output is read continuously and only its end is kept, so that a verbose command neither blocks nor costs memory.
4. A command is not part of the agent: it has its own session, no descriptor and no watchdog of the agent, and the OOM
   killer may kill it like any process.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.actuators import pod_logs, unused_images
from nodeagent.actuators.unused_images import RemovedImages
from nodeagent.config import write_access
from nodeagent.config.schema import ReclaimAction, ReclaimKind
from nodeagent.config.write_access import WriteAccess
from nodeagent.cri.grpc_client import GrpcError
from nodeagent.model import SIGNAL_TABLE, Note, NoteKind, ReclaimOrder, ReclaimOutcome, ReclaimResult
from nodeagent.runtime import workers

_MAX_OUTPUT: Final = 2048
"""Bytes of a command's last output that are kept for its message."""
_PIPE_BYTES: Final = 65536
"""Capacity of a pipe (pipe(7))."""
_POLL_S: Final = 0.05
"""Longest time until the end of a command that has closed its output is detected."""
_STUCK_AFTER_S: Final = 10.0
"""A job that runs so long after its deadline is reported as stuck."""
_MAX_JOBS: Final = 4
"""Jobs at once; the policy orders one at a time, so this is only reached by jobs that do not end."""
JOURNAL_DIRECTORIES: Final = ("/var/log/journal", "/run/log/journal")
"""Of persistent and volatile journals: journald.conf(5)."""
WRITABLE: Final = "needs a writable mount in a container, drop-ins/reclaim.conf for the unit"
_AGENT_VARIABLES: Final = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"})
"""Variables of the service manager for the agent alone."""


class JobResult(NamedTuple):
    """The end of a job."""

    result: ReclaimResult
    message: str
    reclaimed: int = 0
    """Bytes of page cache."""


ReclaimJob = Callable[[float], JobResult]
"""Takes its deadline on time.monotonic()."""


class ReclaimRunner:
    """Runs the jobs of one agent."""

    def __init__(
        self,
        *,
        boottime: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        local_path: Callable[[str], str] = lambda path: path,
        kind: str = "reclaim",
    ) -> None:
        """`wake` is called from another thread when a job has ended. `local_path` maps a path of the host to the
        agent's own file system. `kind` names the threads."""
        self._kind = kind
        self.local_path = local_path
        self._closing = threading.Event()
        self._boottime = boottime
        self._wake = wake
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._finished: list[ReclaimOutcome] = []

    def start(self, plan_id: str, name: str, job: ReclaimJob, *, timeout_s: float) -> None:
        """Start a job. A job that cannot start has failed: `finished` returns it."""
        with self._lock:
            refusal = "still running" if name in self._running else ""
            if len(self._running) >= _MAX_JOBS:
                refusal = f"{_MAX_JOBS} other jobs are running"
            if not refusal:
                self._running.add(name)
        if refusal:
            self._end(plan_id, name, JobResult(ReclaimResult.FAILED, refusal))
            return
        until = time.monotonic() + timeout_s
        thread = workers.start_thread(lambda: self._run(plan_id, name, job, until), name=f"{self._kind} {name}")
        if thread is None:
            self._end(plan_id, name, JobResult(ReclaimResult.FAILED, "no PID left for a thread"))
        else:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def closing(self) -> bool:
        """True if jobs must end now; safe to call from any thread."""
        return self._closing.is_set()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End running jobs, and wait for that at most this long."""
        self._closing.set()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def finished(self) -> list[ReclaimOutcome]:
        """The outcomes since the last call."""
        with self._lock:
            outcomes, self._finished = self._finished, []
        return outcomes

    def _run(self, plan_id: str, name: str, job: ReclaimJob, until: float) -> None:
        try:
            with workers.step("its action", limit_s=until - time.monotonic() + _STUCK_AFTER_S):
                result = job(until)
        except Exception as error:  # whatever it is, the decision must not wait for this job
            result = JobResult(ReclaimResult.FAILED, f"{type(error).__name__}: {error}")
        self._end(plan_id, name, result)
        self._wake()

    def _end(self, plan_id: str, name: str, result: JobResult) -> None:
        with self._lock:
            self._running.discard(name)
            self._finished.append(
                ReclaimOutcome(plan_id, name, result.result, result.message, self._boottime(), result.reclaimed)
            )


# --- orders ----------------------------------------------------------------------------------------------------------

_BUILT_IN: Final[Mapping[ReclaimKind, tuple[str, ...]]] = {
    ReclaimKind.IMAGES: ("crictl", "rmi", "--prune"),
    ReclaimKind.JOURNAL: ("journalctl", "--vacuum-size=200M"),
}


def build_job(
    action: ReclaimAction,
    order: ReclaimOrder,
    *,
    pod_logs_dir: Callable[[], str],
    cri_socket: Callable[[], str],
    ended: Callable[[str], bool],
    stop: Callable[[], bool] = lambda: False,
) -> ReclaimJob:
    """The job of this order for this action. `pod_logs_dir` returns the directory of pod logs on this machine,
    `cri_socket` the configured socket of the container runtime there or "". `ended` returns True for the name of a pod
    directory if the pod has no container any more. `stop` returns True if a job must end early."""
    if action.kind is ReclaimKind.CONTAINER_LOGS:
        return lambda until: _remove_logs(pod_logs_dir(), ended=ended, until=until)
    if uses_socket(action, cri_socket()):
        return lambda until: _remove_images(cri_socket(), until=until, stop=stop)
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
    text = f"removed {removed.files} files, {removed.bytes} bytes"
    if removed.refused:
        text += f"; {removed.refused} could not be removed, first {removed.refusal}"
    if removed.refused and not removed.files:
        return JobResult(ReclaimResult.FAILED, text)
    return JobResult(ReclaimResult.DONE if removed.complete else ReclaimResult.TIMED_OUT, text)


def uses_socket(action: ReclaimAction, cri_socket: str) -> bool:
    """Whether the action removes images through the container runtime's socket instead of by a command."""
    return action.kind is ReclaimKind.IMAGES and not action.command and bool(cri_socket)


def _remove_images(socket: str, *, until: float, stop: Callable[[], bool]) -> JobResult:
    try:
        removed = unused_images.remove_unused_images(socket, until=until, stop=stop)
    except GrpcError as error:
        return JobResult(ReclaimResult.FAILED, f"{socket}: {error}")
    return images_result(removed, socket)


def images_result(removed: RemovedImages, socket: str) -> JobResult:
    """The end of an action that removed these images. It has failed if the runtime refused every removal."""
    text = f"removed {removed.images} images, {removed.bytes} bytes as the runtime counts them"
    if removed.refused:
        text += f"; the runtime refused {removed.refused}, first {removed.refusal}"
    if removed.error:
        return JobResult(ReclaimResult.FAILED, f"{text}; {socket}: {removed.error}")
    if removed.refused and not removed.images:
        return JobResult(ReclaimResult.FAILED, text)
    return JobResult(ReclaimResult.TIMED_OUT if removed.left else ReclaimResult.DONE, text)


def missing_programs(actions: Iterable[ReclaimAction], *, cri_socket: str) -> tuple[Note, ...]:
    """Notes about actions whose program is missing on this machine, or can be changed by other users, before it is
    needed. Reads the file system."""
    programs = (
        (action.name, (action.command or _BUILT_IN.get(action.kind, ("",)))[0])
        for action in actions
        if not uses_socket(action, cri_socket)
    )
    notes = [program_note(NoteKind.RECLAIM, name, program) for name, program in programs if program]
    return tuple([note for note in notes if note is not None])


def read_only_directories(
    actions: Iterable[ReclaimAction], directories: Mapping[ReclaimKind, Iterable[str]]
) -> tuple[Note, ...]:
    """Notes about actions that remove files from `directories`, paths on this machine, if all of those that exist are
    read-only where the agent runs. Reads the file system."""
    found = ((action, _read_only(directories.get(action.kind, ()))) for action in actions if not action.command)
    return tuple(
        Note(NoteKind.RECLAIM, f"{action.name} will fail: {directory} is read-only where the agent runs ({WRITABLE})")
        for action, directory in found
        if directory
    )


def _read_only(directories: Iterable[str]) -> str:
    """The first of these directories; empty if one of them is writable or none exists."""
    read_only = []
    for directory in directories:
        with contextlib.suppress(OSError):
            if not os.statvfs(directory).f_flag & os.ST_RDONLY:
                return ""
            read_only.append(directory)
    return read_only[0] if read_only else ""


def program_note(kind: NoteKind, name: str, program: str) -> Note | None:
    """What is wrong with the program of `name` on this machine, or None. Reads the file system."""
    path = _find_program(program)
    if path is None:
        return Note(kind, f"{name} will fail: no program {program} where the agent runs")
    found = _write_access(path)
    if found is None:
        return None
    return Note(kind, f"{name} runs {path} as this agent's user, and {found.path} {found.reason}: run `{found.fix}`")


def _find_program(program: str) -> str | None:
    """The path of a command, relative to `/`, in which commands run; None if it is missing."""
    directories = [""] if "/" in program else os.get_exec_path()
    paths = (os.path.join("/", directory, program) for directory in directories)
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def _write_access(path: str) -> WriteAccess | None:
    try:
        return write_access.find_write_access(path)
    except OSError:
        return None


# --- commands --------------------------------------------------------------------------------------------------------


def command(
    words: tuple[str, ...], environ: Mapping[str, str], *, stop: Callable[[], bool] = lambda: False
) -> ReclaimJob:
    """A job that runs this program with these variables added to the agent's."""
    inherited = {name: value for name, value in os.environ.items() if name not in _AGENT_VARIABLES}
    return lambda until: run_command(words, {**inherited, **environ}, until=until, stop=stop)


def run_command(
    words: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    until: float,
    stop: Callable[[], bool] = lambda: False,
    stdin: int = subprocess.DEVNULL,
) -> JobResult:
    """Run a program with exactly this environment until it ends, until `until` on time.monotonic(), or until `stop`
    returns True. `stdin` is a descriptor, which the caller closes."""
    try:
        process = subprocess.Popen(  # noqa: S603 - words of the administrator's configuration, without a shell
            words,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return JobResult(ReclaimResult.FAILED, f"{words[0]}: {reason}")
    _drop_oom_protection(process.pid)
    assert process.stdout is not None
    with process.stdout:
        output, in_time = _follow(process.pid, process.stdout.fileno(), until, stop)
        _end_group(process.pid)
        code = process.wait()
    text = output.decode("utf-8", "replace").strip()
    if not in_time:
        return JobResult(ReclaimResult.TIMED_OUT, text)
    if code:
        return JobResult(ReclaimResult.FAILED, f"exit code {code}" + (f": {text}" if text else ""))
    return JobResult(ReclaimResult.DONE, text)


def _follow(pid: int, fd: int, until: float, stop: Callable[[], bool]) -> tuple[bytes, bool]:
    """(the end of the output, whether the program ended in time). The program is not reaped."""
    os.set_blocking(fd, False)
    output, open_ = b"", True
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            left_s = until - time.monotonic()
            if open_ and selector.select(max(0.0, min(_POLL_S, left_s))):
                chunk = os.read(fd, _PIPE_BYTES)
                output = (output + chunk)[-_MAX_OUTPUT:]
                if not chunk:
                    selector.unregister(fd)
                    open_ = False
            elif not open_:
                time.sleep(max(0.0, min(_POLL_S, left_s)))
            if _has_ended(pid):
                return (output + _read_rest(fd))[-_MAX_OUTPUT:] if open_ else output, True
            if left_s <= 0 or stop():
                return output, False


def _read_rest(fd: int) -> bytes:
    """The rest of an ended program's output. One read returns all that a pipe contains; processes that the program left
    running may write for ever."""
    try:
        return os.read(fd, _PIPE_BYTES)
    except BlockingIOError:
        return b""


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # no process is left in it
    except PermissionError:
        return  # only processes of another user are left, which the agent cannot signal


def _drop_oom_protection(pid: int) -> None:
    """Remove the protection from the OOM killer that a command inherits from the agent."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
            file.write("0")
    except OSError:
        return  # it has ended already, or the kernel refuses: it is short-lived either way
