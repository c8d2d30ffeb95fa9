"""CPU time of reading the own memory limits of pods once (`ownLimit`): `python -m benchmarks.own_limits [pods...]`.

Real pod-shaped cgroups (root and cgroup v1), one container with one process in each. Three columns:

* `still`: no pod has moved since the last reading;
* `far`: each pod uses less than 40% of its limit and has moved, so its usage is read and its growth computed;
* `near`: each pod is above that and has moved, so memory.stat and the counters are read and the trend is computed too.

Each figure is the least CPU time of several readings.
"""

import functools
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable

from nodeagent.config.own_limit import OwnLimitConfig
from nodeagent.config.schema import Config, SamplingConfig
from nodeagent.loop.own_limit_watch import OwnLimitWatch
from nodeagent.model import Pod, PodSource, QOSClass
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from tests.support.livenode import HIERARCHIES, MIB, Kubepods, container_id

SIZES = (110,)
REPEATS = 30
USED_MIB = 4


def main() -> None:
    print(f"{'pods':>6} {'still':>10} {'far':>10} {'near':>10}")
    for size in [int(each) for each in sys.argv[1:]] or SIZES:
        print(f"{size:>6} " + " ".join([f"{each * 1e6:>7.0f} us" for each in measure(size)]))


def measure(pods: int) -> list[float]:
    """CPU seconds of one reading, for each column."""
    kubepods, processes = Kubepods(limit=8 << 30), []
    uids = [str(uuid.uuid4()) for _ in range(pods)]
    try:
        for uid in uids:
            kubepods.make_idle(uid, qos="burstable")
            processes.append(_filled(kubepods, uid))
        api = [Pod(uid, uid, "shop", f"p{index}", PodSource.API, QOSClass.BURSTABLE) for index, uid in enumerate(uids)]
        config = Config(own_limit=OwnLimitConfig(enabled=True, namespaces=("shop",)))
        with Sampler(open_host("/"), SamplingConfig(cgroup_root=f"/{kubepods.root}"), node_name="n") as sampler:
            watch = OwnLimitWatch()
            figures = []
            for limit_mib, moved in ((100 * USED_MIB, False), (100 * USED_MIB, True), (2 * USED_MIB, True)):
                for uid in uids:
                    _limit(kubepods, uid, limit_mib)
                watch.reset()
                watch.set_targets(sampler.sample(api).pods, config)
                fresh = frozenset(uids if moved else ())
                figures.append(_least(functools.partial(watch.read, sampler, config=config, fresh=fresh)))
        return figures
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        kubepods.close()


def _least(read: Callable[..., object]) -> float:
    times, now = [], time.clock_gettime(time.CLOCK_BOOTTIME)
    for number in range(REPEATS):
        began = time.process_time()
        read(now=now + number * 0.01)
        times.append(time.process_time() - began)
    return min(times)


def _filled(kubepods: Kubepods, uid: str) -> int:
    """The PID of a process in the pod's container that holds `USED_MIB`."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for hierarchy in HIERARCHIES:
            [container] = (hierarchy / kubepods.root / "kubepods").glob(f"*/pod{uid}/{container_id(uid)}")
            (container / "cgroup.procs").write_text("0")
        held = bytearray(b"x") * (USED_MIB * MIB)
        os.write(write, b"r" if held else b"")
        while True:
            signal.pause()
    os.read(read, 1)
    os.close(read)
    os.close(write)
    return pid


def _limit(kubepods: Kubepods, uid: str, mib: int) -> None:
    [file] = (HIERARCHIES[0] / kubepods.root / "kubepods").glob(f"*/pod{uid}/*/memory.limit_in_bytes")
    file.write_text(str(mib * MIB))


if __name__ == "__main__":
    main()
