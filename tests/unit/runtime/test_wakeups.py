"""The loop wakes up for events and for nothing else."""

import os
import signal
import threading
import time

from nodeagent.runtime.wakeups import TIMER, WORKER, Wakeups


def test_it_sleeps_until_the_timeout() -> None:
    with Wakeups() as wakeups:
        before = time.monotonic()
        assert wakeups.wait(0.05) == (frozenset({TIMER}), ())
        assert time.monotonic() - before >= 0.05


def test_another_thread_wakes_it_and_many_calls_are_one_wake_up() -> None:
    with Wakeups() as wakeups:
        threads = [threading.Thread(target=wakeups.wake) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wakeups.wait(10)[0] == {WORKER}
        assert wakeups.wait(0)[0] == {TIMER}


def test_a_signal_wakes_it_and_is_returned() -> None:
    with Wakeups([signal.SIGUSR1]) as wakeups:
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        seen: tuple[signal.Signals, ...] = ()
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            _, seen = wakeups.wait(10)
        assert seen == (signal.SIGUSR1,)


def test_handlers_are_restored_at_the_end() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Wakeups([signal.SIGUSR1]):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_registered_descriptor_wakes_it_for_its_reason_until_unregistered() -> None:
    reader, writer = os.pipe()
    drained: list[bytes] = []
    with Wakeups() as wakeups:
        wakeups.register(reader, "pipe", lambda: drained.append(os.read(reader, 100)))
        os.write(writer, b"x")
        assert wakeups.wait(10)[0] == {"pipe"}
        assert wakeups.wait(0)[0] == {TIMER}
        wakeups.unregister(reader)
        os.write(writer, b"x")
        assert wakeups.wait(0)[0] == {TIMER}
    os.close(reader)
    os.close(writer)
