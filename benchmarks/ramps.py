"""Memory ramps in the virtual machine, stopped by nodeagent and by its peers in turns.

    python -m benchmarks.ramps [--runs 3] [--speeds 10 25 50 100 full] [--contenders NAME...] [--minutes N]
                               [--ignore-sigterm] [--json FILE]

Needs the same as tests/vm (QEMU, and root for the first build of the image). All run in one machine of 2 GiB, on the
same ramps, with the same limit of 200 MiB, which is nodeagent's built-in hard threshold there. An API double answers
the agent. The kubelet's part of an eviction is SIGTERM 0.3 s after the request (a real one had the memory back 0.25 to
0.35 s after the deletion), and SIGKILL after 1.5 s. The growing process ends at SIGTERM, that of earlyoom or of the
kubelet; with --ignore-sigterm it does not, as the first process of a container without a handler. The contenders:

* `unit`: the systemd unit with systemd/config.yaml, nothing changed;
* `container`: daemonset.yaml's container with its own configuration, memory limit and CPU request;
* `brake`: the unit with drop-ins/brake.conf, and `escalation.brake: throttle` as the only change;
* `earlyoom`: Debian's earlyoom (nice -20), SIGTERM below 200 MiB of MemAvailable and SIGKILL below 100 (its default,
  10% and 5%, is 197 and 98 MiB in this machine);
* `oomd`: Debian's systemd-oomd, ManagedOOMMemoryPressure=kill on the pods' slice, with its defaults: 60% for 30 s;
* `oomd-early`: the same with 5% for 1 s, the shortest duration that it accepts.

A run is lost if the OOM killer acted or if anything but the growing pod ended. For each speed and contender the table
has the lost runs; the lowest MemAvailable of all runs as a share of the limit; medians of the time from the crossing to
the recovery, and of the stall (PSI) in that time, with the longest in brackets; and the actual speed of the last 100
MiB before the limit. A run in which a contender killed the growing process before its ramp or above the limit is named
above the table. The node's full stall includes that of the growing pod itself, also while a brake throttles it; the
system's is that of any process of system.slice. Nothing is asserted, because the machine is emulated; the order of the
contenders is the result.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import contenders
from benchmarks.contenders import HARD_MIB, Running
from tests.fake_kube import ApiServer
from tests.vm import agent_container
from tests.vm.agent_container import AgentContainer
from tests.vm.image import image, why_not
from tests.vm.machine import CommandFailedError, booted
from tests.vm.ramps import MIB, NODE, Node, Ramp, Result

SOFT_MIB: Final = 300
"""The built-in thresholds in this machine are this one and `contenders.HARD_MIB`."""
FULL: Final = 4096
"""MiB a second: more than the machine can touch."""
LEAVE_MIB: Final = {10: 330, 25: 360, 50: 420, 100: 600, FULL: 1200}
"""MemAvailable before the start: shortly above the soft threshold, and a second of the ramp above the hard one."""
SPEEDS: Final = tuple(LEAVE_MIB)
TERM_S: Final = 0.3
CONTENDERS: Final = ("unit", "container", "brake", "earlyoom", "oomd", "oomd-early")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--speeds", type=_speed, nargs="+", default=SPEEDS, metavar="MIB_PER_S")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS, metavar="NAME")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this time")
    parser.add_argument("--ignore-sigterm", action="store_true", help="the growing process ends at SIGKILL only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to this file")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"needs a virtual machine: {reason}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="ramps-") as scratch,
        ApiServer(node=NODE, linger_s=None) as api,
        booted(image(), Path(scratch)) as machine,
    ):
        kubeconfig = api.kubeconfig(Path(scratch) / "kubeconfig").read_text(encoding="utf-8")
        contenders.install(machine, Path(scratch))
        running: dict[str, Running] = {
            "unit": contenders.unit,
            "brake": contenders.brake,
            "earlyoom": contenders.earlyoom,
            "oomd": contenders.oomd,
            "oomd-early": functools.partial(contenders.oomd, configuration=contenders.EARLY_OOMD),
        }
        if "container" in options.contenders:
            built = agent_container.install_image(machine, Path(tempfile.mkdtemp(dir=scratch)))
            agent = AgentContainer(machine, built, api, kubeconfig, node=NODE)
            running["container"] = functools.partial(contenders.container, agent=agent)
        node = Node(machine, api, kubeconfig)
        node.allow_brake(False)
        node.term_s = TERM_S
        ramps = [
            Ramp(speed, LEAVE_MIB.get(speed, 2 * SOFT_MIB), HARD_MIB, SOFT_MIB, options.ignore_sigterm)
            for speed in options.speeds
        ]
        results: list[tuple[int, str, Result]] = []
        try:
            measure(node, {name: running[name] for name in options.contenders}, ramps, options, results)
        finally:
            print_table(results)
        node.close()
    return 0


def measure(
    node: Node,
    running: dict[str, Running],
    ramps: Sequence[Ramp],
    options: argparse.Namespace,
    results: list[tuple[int, str, Result]],
) -> None:
    """Run all contenders in turns on each ramp, one run of everything before the next one, and add what came of it."""
    ends_at = time.monotonic() + 60 * options.minutes
    for run, ramp, name in itertools.product(range(options.runs), ramps, running):
        if time.monotonic() > ends_at:
            print(f"stopped after {options.minutes:g} min", file=sys.stderr)
            break
        began = time.monotonic()
        with running[name](node) as log:
            try:
                result = node.ramp(ramp, agent=False)
            except CommandFailedError as error:
                print(f"{_name(ramp.mib_per_s)} {name}: no ramp in one run: {str(error).splitlines()[-1][-200:]}")
                print(log(), file=sys.stderr)
                continue
            if result.mib_per_s is None:
                print(f"{_name(ramp.mib_per_s)} {name}: the growing process ended above the limit in one run")
                continue
            result = result._replace(log=log() if lost(result) else "")
        results.append((ramp.mib_per_s, name, result))
        took_s = time.monotonic() - began
        shown = f"{_name(ramp.mib_per_s)} {name} {run + 1}/{options.runs}, {took_s:.0f} s: {result._replace(log='')}"
        print(shown, file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps([_as_json(*each) for each in results], indent=1), encoding="utf-8")


def print_table(results: Sequence[tuple[int, str, Result]]) -> None:
    """One line for each speed and contender."""
    print(
        f"{'MiB/s':>6}  {'contender':<11} {'lost':>5}  {'lowest/limit':>12}  {'back, s':>8}  {'full stall, s':>13}  "
        f"{'system stall, s':>15}  {'real MiB/s':>10}"
    )
    for speed, name in dict.fromkeys((speed, name) for speed, name, _ in sorted(results, key=lambda each: each[0])):
        found = [result for at, who, result in results if (at, who) == (speed, name)]
        print(f"{_name(speed):>6}  {name:<11} {row(found)}", flush=True)


def lost(result: Result) -> bool:
    """Whether the OOM killer was faster, or another pod than the growing one ended."""
    return result.oom_kills > 0 or result.alive != {"chill"} or not {"bloated"}.issuperset(result.victims)


def row(found: list[Result]) -> str:
    """One line of the table."""
    lowest = min(result.lowest for result in found) / (HARD_MIB * MIB)
    back = _median(result.back_s for result in found)
    node, system = _longest(r.stall_s for r in found), _longest(r.system_stall_s for r in found)
    share = f"{sum(lost(result) for result in found)}/{len(found)}"
    speed = _median(result.mib_per_s for result in found)
    return f"{share:>5}  {lowest:>12.2f}  {back:>8.2f}  {node:>13}  {system:>15}  {speed:>10.0f}"


def _longest(stalls: Iterable[float | None]) -> str:
    known = [value for value in stalls if value is not None]
    return f"{statistics.median(known):.2f} ({max(known):.2f})" if known else "-"


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else float("nan")


def _speed(text: str) -> int:
    return FULL if text == "full" else int(text)


def _name(speed: int) -> str:
    return "full" if speed == FULL else str(speed)


def _as_json(speed: int, contender: str, result: Result) -> dict[str, Any]:
    values = {key: sorted(value) if key == "alive" else value for key, value in result._asdict().items()}
    return {"speed": _name(speed), "contender": contender, "lost": lost(result), "limit": HARD_MIB * MIB, **values}


if __name__ == "__main__":
    sys.exit(main())
