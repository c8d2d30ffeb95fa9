"""An agent in a process of its own, which does one step for each command. It can be killed in the middle of a step.

The process is a fork, so the caller must have no agent of its own while it starts one. Its evictions arrive at once,
as they would at an API server: also those of a step that does not end.
"""

import contextlib
import json
import os
import select
import signal
import time
import traceback
from typing import Any, Final, NamedTuple

from tests.faults import injected
from tests.faults.scene import Scene

STEP_S: Final = 60.0
"""Longest real time of a step. A usual one takes some milliseconds."""
LAUNCH, SYNC, STOP = "launch", "sync", "stop"
_send = os.write


class Inject(NamedTuple):
    """What to inject into a step."""

    number: int
    """Of the call, as `Done` counts them."""
    how: str
    """`kill`, `kill amid`, `full`, `full once`."""


class Done(NamedTuple):
    """A step that has ended."""

    calls: tuple[str, ...]
    """The system calls of its thread."""
    writes: tuple[str, ...]
    """The calls of all its threads that need space in the state directory."""
    failure: str
    """The traceback; empty if there is none."""
    beside: str
    """The lock of another agent that acts; empty if this one acts."""


class AgentProcess:
    """One process with one agent in this scene, which has none yet."""

    def __init__(self, world: Scene) -> None:
        self._world = world
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._buffer = b""
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self.pid = os.fork()
        if self.pid == 0:  # pragma: no cover - another process
            os.close(self._orders)
            os.close(self._answers)
            try:
                _serve(world, orders, answers)
            finally:
                os._exit(0)
        os.close(orders)
        os.close(answers)

    def do(self, step: str, inject: Inject | None = None) -> Done | None:
        """Run a step. None if the process died in it. Raises TimeoutError if it hangs. What it evicts is in the scene's
        cluster, whose clock it moves."""
        order = {"step": step, "now": self._world.now, "inject": inject}
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        deadline = time.monotonic() + STEP_S
        while True:
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                answer = json.loads(line)
                if "evicted" in answer:
                    self._world.cluster.evicted.append(answer["evicted"])
                    continue
                self._world.now = answer["now"]
                return Done(tuple(answer["calls"]), tuple(answer["writes"]), answer["failure"], answer["beside"])
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"{step} has not ended after {STEP_S:.0f} s")
            data = os.read(self._answers, 65536)
            if not data:
                return None
            self._buffer += data

    def kill(self) -> None:
        """SIGKILL, then wait for its end."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
            os.close(self._orders)
            os.close(self._answers)


def _serve(world: Scene, orders: int, answers: int) -> None:
    def send(**answer: Any) -> None:
        _send(answers, json.dumps(answer).encode() + b"\n")

    with os.fdopen(orders, encoding="ascii") as lines, contextlib.ExitStack() as stack:
        for line in lines:
            order = json.loads(line)
            world.now, failure = order["now"], ""
            calls: tuple[str, ...] = ()
            writes: tuple[str, ...] = ()
            inject = Inject(*order["inject"]) if order["inject"] else None
            try:
                calls, writes = _step(world, order["step"], inject, stack, lambda name: send(evicted=name))
            except Exception:
                failure = traceback.format_exc(limit=-6)
            send(now=world.now, calls=calls, writes=writes, failure=failure, beside=world.beside)


def _step(
    world: Scene, step: str, inject: Inject | None, stack: contextlib.ExitStack, evicted: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the system calls, and those that need space. A full disk stays full."""

    def run() -> None:
        if step == LAUNCH:
            world.launch()
            world.cluster.on_eviction = evicted
            world.start()
        elif step == SYNC and not world.locks:
            world.sync()
        elif step == SYNC:
            if world.sync_in_role():
                world.close()
                world.launch()
                world.cluster.on_eviction = evicted
        else:
            world.close()

    if inject is None:
        with injected.full(world.state, first=-1, only=True) as writes, injected.counted() as calls:
            run()
        return tuple(call.name for call in calls), tuple(writes)
    if inject.how.startswith("full"):
        full = injected.full(world.state, first=inject.number, only=inject.how == "full once")
        stack.enter_context(full)
        run()
    else:
        with injected.killing(inject.number, amid=inject.how == "kill amid"):
            run()
    return (), ()
