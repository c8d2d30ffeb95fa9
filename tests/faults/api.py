"""Each answer of the API server replaced, broken, delayed or repeated, at each kind of request and in each phase.

A case is a phase, a place (a kind of request) and a fault. The fault meets every request of that kind from the start of
the phase until it has been injected and `FAULT_S` are over; then it passes, and the agent must recover. Under pressure
that means: the right pod is evicted. In a calm phase the node comes under pressure afterwards, with the same demand.
"""

import concurrent.futures
import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.fake_kube import Answer, ApiServer, Request
from tests.faults import api_faults, api_scene, runs
from tests.faults.api_faults import RECORDED, Fault, Lines
from tests.faults.api_scene import NODE, SOFT_PRESSED, ApiScene
from tests.faults.scene import CALM, PRESSED
from tests.support.trees import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

FAULT_S: Final = 0.25
"""Shortest real time of a fault, so that the repetitions meet it, too."""
REACH_S: Final = 20.0
"""Longest wait until the agent makes the request. An Event may wait 3 s."""
CLOSE_S: Final = 30.0
"""Longest stop of the agent: several requests of at most 0.4 s each, on a machine that may be very busy."""
NOT_REACHED: Final = "request not made"
"""No injection: the agent did not make the request within `REACH_S`."""
RUNS: Final = 3
JOBS: Final = 8
"""Processes. A case waits most of its time, and each has an agent of its own."""


class Place(NamedTuple):
    """A kind of request."""

    method: str
    start: str
    """Of the path."""
    ending: str
    watch: bool = False
    own: bool | None = None
    """True: with a selector of one object; False: without."""

    def matches(self, request: Request) -> bool:
        if (request.method, "watch" in request.query) != (self.method, self.watch):
            return False
        if not (request.path.startswith(self.start) and request.path.endswith(self.ending)):
            return False
        return self.own is None or self.own == ("metadata.name" in request.query.get("fieldSelector", ""))

    @property
    def form(self) -> str:
        """Which faults it has."""
        lists = self.method == "GET" and self.ending.rpartition("/")[2] in _COLLECTIONS
        return "watch" if self.watch else "list" if lists else "request"


_COLLECTIONS: Final = ("pods", "nodes", "poddisruptionbudgets", "leases")
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/nodeagent/leases"
PLACES: Final[dict[str, Place]] = {
    "list pods": Place("GET", "/api/v1/pods", "/pods"),
    "watch pods": Place("GET", "/api/v1/pods", "/pods", watch=True),
    "list own node": Place("GET", "/api/v1/nodes", "/nodes", own=True),
    "watch own node": Place("GET", "/api/v1/nodes", "/nodes", watch=True),
    "list nodes": Place("GET", "/api/v1/nodes", "/nodes", own=False),
    "get node": Place("GET", "/api/v1/nodes/", f"/{NODE}"),
    "patch node status": Place("PATCH", "/api/v1/nodes/", f"/{NODE}/status"),
    "patch taints": Place("PATCH", "/api/v1/nodes/", f"/{NODE}"),
    "review own user": Place("POST", "/apis/authentication.k8s.io/", "/selfsubjectreviews"),
    "review own rights": Place("POST", "/apis/authorization.k8s.io/", "/selfsubjectaccessreviews"),
    "get version": Place("GET", "/version", "/version"),
    "evict": Place("POST", "/api/v1/namespaces/", "/eviction"),
    "list victim": Place("GET", "/api/v1/namespaces/", "/pods", own=True),
    "list PDBs": Place("GET", "/apis/policy/v1/", "/poddisruptionbudgets"),
    "watch PDBs": Place("GET", "/apis/policy/v1/", "/poddisruptionbudgets", watch=True),
    "get claim": Place("GET", "/api/v1/namespaces/", "/persistentvolumeclaims/data"),
    "get volume": Place("GET", "/api/v1/persistentvolumes/", "/pv-data"),
    "list leases": Place("GET", _LEASES, "/leases"),
    "create lease": Place("POST", _LEASES, "/leases"),
    "get owner": Place("GET", "/apis/apps/v1/", "/rs-hog"),
    "create Event": Place("POST", "/apis/events.k8s.io/v1/", "/events"),
}


class Phase(NamedTuple):
    """When the fault is there."""

    node: Node
    places: tuple[str, ...]
    first: bool = False
    """From the start of the agent on."""
    stir: Callable[[ApiServer, Place], None] = lambda *_: None
    """What happens in the cluster at the beginning of the fault."""
    refused: bool = False
    """The first eviction is answered with a 404."""


def _stir(api: ApiServer, place: Place) -> None:
    """Every watch ends, objects change and another client overwrites a condition; before a list the versions of the
    watches become too old, too."""
    api.end_watches()
    api_scene.pause(0.05)
    api.write_condition("NodeAgentMemoryPressure", "Unknown", "Other", "another client")
    _change(api, place)
    if place.form == "list":
        api.compact()


def _change(api: ApiServer, _: Place) -> None:
    """Objects change, twice each."""
    for number in range(2):
        for namespace, name in list(api.store.objects["pods"]):
            api.modify_pod(namespace, name, lambda pod, n=number: pod["metadata"]["labels"].update(turn=str(n)))  # type: ignore[misc]
        api.patch_node({"metadata": {"labels": {"turn": str(number)}}})


_START: Final = ("get node", "list pods", "watch pods", "list own node", "watch own node", "review own user")
_ACT: Final = ("patch node status", "patch taints", "list PDBs", "watch PDBs", "evict", "create Event")
PHASES: Final[dict[str, Phase]] = {
    "first sync": Phase(CALM, (*_START, "review own rights", "patch node status"), first=True, stir=_change),
    "first sync, under pressure": Phase(
        PRESSED, (*_START, "get claim", "get volume", "list PDBs", "evict"), first=True
    ),
    "calm sync": Phase(
        CALM, ("list pods", "watch pods", "watch own node", "list own node", "patch node status"), stir=_stir
    ),
    "sync that evicts": Phase(PRESSED, (*_ACT, "get version")),
    "sync that evicts, watches ended": Phase(PRESSED, ("list pods", "watch pods", "evict"), stir=_stir),
    "soft sync that evicts": Phase(SOFT_PRESSED, (*_ACT, "list nodes", "list leases", "create lease", "get owner")),
    "sync with a refused eviction": Phase(PRESSED, ("list victim", "evict"), refused=True),
}


class Injector:
    """Injects one fault into the requests of one place."""

    def __init__(self, place: Place, fault: Fault, *, refused: bool = False) -> None:
        self._place, self._fault = place, fault
        self._refuse = refused
        self.active = False
        self.hits = 0

    def install(self, api: ApiServer) -> None:
        api.instead, api.on_answer, api.on_watch = self._instead, self._answer, self._watch

    def _meets(self, request: Request) -> bool:
        return self.active and self._place.matches(request)

    def _instead(self, request: Request) -> Answer | None:
        if self._refuse and request.path.endswith("/eviction"):
            self._refuse = False
            refusal = RECORDED["404 eviction-404"].instead
            assert refusal is not None
            return refusal(lambda: True)
        if self._fault.instead is None or not self._meets(request):
            return None
        self.hits += 1
        return self._fault.instead(lambda: self.active)

    def _answer(self, request: Request, head: bytes, body: bytes) -> "Iterator[bytes]":
        if self._fault.answer is None or not self._meets(request):
            yield head + body
            return
        self.hits += 1
        yield from self._fault.answer(head, body, lambda: self.active)

    def _watch(self, request: Request, lines: Lines) -> Lines:
        if self._fault.watch is None or not self._meets(request):
            return lines
        self.hits += 1
        return self._fault.watch(lines, lambda: self.active)


class Case(NamedTuple):
    """Names in the tables above."""

    phase: str
    place: str
    fault: str


def cases() -> list[Case]:
    """All of them."""
    return [
        Case(name, place, fault)
        for name, phase in PHASES.items()
        for place in phase.places
        for fault in api_faults.FAULTS[PLACES[place].form]
    ]


class Result(NamedTuple):
    case: Case
    hits: int
    """How often the fault was injected."""
    result: str
    detail: str


def run(case: Case) -> Result:
    """One case, in this process. A hang counts if each of `RUNS` runs has it: a virtual machine stops for moments."""
    fault = api_faults.FAULTS[PLACES[case.place].form][case.fault]
    waits = case.fault == api_faults.RETRY_AFTER
    recover_s = api_scene.RECOVER_AFTER_WAIT_S if waits else api_scene.RECOVER_S
    for _ in range(RUNS - 1):
        result = inject(case, fault, recover_s=recover_s)
        if result.result != "hang":
            return result
    return inject(case, fault, recover_s=recover_s)


def inject(case: Case, fault: Fault, *, recover_s: float = api_scene.RECOVER_S) -> Result:
    """This fault, in the phase and at the place of the case. `recover_s`: real time for all to be well again."""
    phase, place = PHASES[case.phase], PLACES[case.place]
    injector = Injector(place, fault, refused=phase.refused)
    closing_at = 0.0
    try:
        injector.active = phase.first
        with api_scene.api_scene(injector.install) as world:
            world.recover_s = recover_s
            result, detail = _judged(world, phase, place, injector)
            closing_at = time.monotonic()
    except Exception:
        return Result(case, injector.hits, "traceback", traceback.format_exc(limit=-6))
    if (closed_s := time.monotonic() - closing_at) > CLOSE_S and result not in runs.BAD:
        result, detail = "hang", f"the agent stopped after {closed_s:.1f} s"
    return Result(case, injector.hits, result, detail)


def _judged(world: ApiScene, phase: Phase, place: Place, injector: Injector) -> tuple[str, str]:
    pressed = phase.node is not CALM
    if not phase.first and not world.until(lambda: not world.unknown, within_s=api_scene.RECOVER_S, step_s=0.1):
        return "not recovered", f"before the fault: {world.unknown}"

    def faulty() -> None:
        world.write(phase.node)
        injector.active = True
        phase.stir(world.api, place)
        began = time.monotonic()
        world.until(
            lambda: injector.hits and time.monotonic() - began > FAULT_S,
            within_s=REACH_S,
            step_s=1.0 if pressed else 0.2,
        )
        injector.active = False

    def recover() -> None:
        world.recover(pressed=pressed)

    result, detail = runs.judge(world, [faulty, recover], pressed=pressed)
    if result not in runs.BAD and world.blocked_s > api_scene.BLOCKED_S:
        return "hang", f"a sync waited for {world.blocked_s:.1f} s"
    if result not in runs.BAD and injector.hits > api_scene.STORM:
        return "hang", f"{injector.hits} requests without a pause"
    if result not in runs.BAD and not pressed:
        world.write(PRESSED)
        after, detail = runs.judge(world, [lambda: world.recover(pressed=True)], pressed=True)
        if after in runs.BAD:
            return after, f"in the pressure after it: {detail}"
    return result, detail


def api_answers(table: runs.Table, every: int) -> None:
    """Every fault at every place, in some processes at once."""
    chosen = list(runs.sample(cases(), every))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(JOBS, -(-len(chosen) // 8)), mp_context=context) as pool:
        for case, hits, result, detail in pool.map(run, chosen):
            where = f"{case.place}, {case.phase}"
            if hits or result in runs.BAD:
                table.add(where, case.fault, result, detail, injected=hits)
            else:
                table.add(where, case.fault, NOT_REACHED, injected=0)
