"""systemd/nodeagent.service, installed and run by a real systemd, an older and a newer one: it starts, acts, is
watched, and stops."""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fake_kube import ApiServer, Json, pod
from tests.support.certificates import make, server_context
from tests.vm.image import NEWER, OLDER, Suite
from tests.vm.machine import HOST_LOOPBACK, Machine, wait_for_text
from tests.vm.pods import VmPod, kill_pod, start_pod
from tests.vm.published import answer

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

NODE: Final = "vm-node"
GUARDED: Final = 64 << 20
"""Bytes: MemoryMin of the unit."""
WORST_EXPOSURE: Final = 2.2
"""What `systemd-analyze security` gives the unit (0 best, 10 worst; an unhardened unit has 9.6)."""
WAITS_FOR_RELOADS: Final = 253
"""The first systemd with Type=notify-reload."""

on_both = pytest.mark.parametrize(
    "suite", [OLDER, NEWER], ids=lambda suite: f"systemd {suite.systemd}", indirect=True, scope="module"
)
"""What may differ; the rest is run on the older machine only, for time's sake."""

CONFIGURATION: Final = """\
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
mode: enforce
evictionHard: {memory.available: 700Mi}
evictionPressureTransitionPeriod: 5s
metrics: {address: "127.0.0.1:9655"}
startup: {freshSamples: 2}
protection: {minimumAge: 0s, barePods: false}
"""


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Suite:
    found: Suite = getattr(request, "param", OLDER)
    return found


@pytest.fixture(scope="module")
def api(suite: Suite) -> Iterator[ApiServer]:
    with ApiServer(node=NODE, linger_s=None) as double:
        yield double


@pytest.fixture(scope="module")
def service(
    suite: Suite, request: pytest.FixtureRequest, api: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    """The unit installed as docs/bare-metal.md describes, not started."""
    machine: Machine = request.getfixturevalue("machine" if suite == OLDER else "newer_machine")
    kubeconfig = api.kubeconfig(tmp_path_factory.mktemp("api") / "kubeconfig").read_text(encoding="utf-8")
    machine.write("/etc/nodeagent/kubeconfig", kubeconfig.replace("127.0.0.1", HOST_LOOPBACK), mode=0o600)
    machine.write("/etc/nodeagent/config.yaml", CONFIGURATION)
    machine.run(
        "rm -rf /etc/systemd/system/nodeagent.service.d && "
        "install -m 644 /run/vm/systemd/nodeagent.service /run/vm/systemd/nodeagent.slice /etc/systemd/system/ && "
        "systemctl daemon-reload"
    )
    if suite.systemd < WAITS_FOR_RELOADS:
        machine.run(
            "install -D -m 644 -t /etc/systemd/system/nodeagent.service.d /run/vm/systemd/drop-ins/before-253.conf && "
            "systemctl daemon-reload"
        )
    yield machine
    machine.run("systemctl stop nodeagent.service", timeout_s=180)
    machine.run(
        "systemctl reset-failed nodeagent.service; rm -rf /etc/systemd/system/nodeagent.service.d; "
        "systemctl daemon-reload",
        check=False,
    )


@pytest.fixture
def running(service: Machine) -> Machine:
    """The service as it is installed. One start serves several tests: it takes ten seconds in an emulated machine."""
    start(service)
    return service


def start(machine: Machine) -> None:
    """Starts the service unless it runs, or fails with what it logged."""
    started = machine.run("systemctl start nodeagent.service", timeout_s=240, check=False)
    assert started.returncode == 0, machine.run("journalctl -n 40 --unit=nodeagent.service").stdout


def show(machine: Machine, name: str) -> str:
    """A property of the service."""
    return machine.run(f"systemctl show --value --property={name} nodeagent.service").stdout.strip()


def journal(machine: Machine) -> str:
    """What the service logged since it was last started."""
    return machine.run("journalctl --output=cat --unit=nodeagent.service _SYSTEMD_INVOCATION_ID=$(systemctl show "
                       "--value --property=InvocationID nodeagent.service)").stdout  # fmt: skip


def wait_for_log(machine: Machine, text: str) -> None:
    """Returns when the service has logged this."""
    wait_for_text(lambda: journal(machine), text)


def wait_until_reloaded(machine: Machine) -> None:
    """Returns when systemd knows of no reload under way any more: an older one goes on before the agent is done."""
    machine.run(
        "timeout 60 sh -c 'while test $(systemctl show --value --property=ActiveState nodeagent.service) = reloading; "
        "do sleep 0.1; done'; systemctl is-active nodeagent.service"
    )


@on_both
def test_the_unit_has_no_mistake_that_systemd_sees(service: Machine, suite: Suite) -> None:
    """But for the type that an older one does not know: it keeps the one before."""
    verified = service.run("systemd-analyze verify /etc/systemd/system/nodeagent.service")
    lines = (verified.stdout + verified.stderr).splitlines()
    if suite.systemd >= WAITS_FOR_RELOADS:
        assert lines == []
        assert show(service, "Type") == "notify-reload"
    else:
        assert [line.partition(": ")[2] for line in lines] == ["Failed to parse service type, ignoring: notify-reload"]
        assert show(service, "Type") == "notify"


@on_both
def test_the_unit_is_as_tight_as_documented(service: Machine) -> None:
    output = service.run("systemd-analyze security --no-pager nodeagent.service", check=False).stdout
    exposure = re.search(r"Overall exposure level for nodeagent\.service: ([0-9.]+)", output)
    assert exposure, output
    assert float(exposure[1]) <= WORST_EXPOSURE, output


def test_the_unit_is_started_when_it_is_ready_and_systemd_shows_its_status(running: Machine, api: ApiServer) -> None:
    assert show(running, "ActiveState") == "active"
    running.run(  # of the first decision, for which the agent waits until the API server has listed the pods
        "timeout 60 sh -c 'until systemctl show --value --property=StatusText nodeagent.service | grep pods; "
        "do sleep 0.2; done'"
    )
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 180), journal(running)
    condition = api.condition("NodeAgentMemoryPressure")
    assert condition is not None
    assert condition["status"] == "False"
    assert api.sent("GET", f"/nodes/{NODE}") or api.sent("GET", "/nodes")


@on_both
def test_the_sandbox_hides_nothing_that_it_needs(running: Machine) -> None:
    wait_for_log(running, '"event":"signal changed"')  # it has sampled everything
    log = journal(running)
    assert "Permission denied" not in log
    assert "Operation not permitted" not in log
    # What the drop-in for brakes opens as well. Whether there are pods to be watched the tests before this one decide.
    pods_stalls = "no PSI trigger on /sys/fs/cgroup/kubepods.slice/memory.pressure: Read-only file system"
    assert log.count("Read-only file system") == log.count(pods_stalls) <= 1
    assert '"event":"started"' in log
    assert '"level":"error"' not in log


def test_it_runs_where_nothing_can_take_its_memory_and_the_oom_killer_comes_last(running: Machine) -> None:
    process = show(running, "MainPID")
    output = running.run(
        f"cat /proc/{process}/oom_score_adj /sys/fs/cgroup/nodeagent.slice/memory.min "
        f"/sys/fs/cgroup/nodeagent.slice/nodeagent.service/memory.min; grep CapBnd /proc/{process}/status"
    ).stdout.split()
    dac_read_search, sys_resource = 1 << 2, 1 << 24
    assert output[:3] == ["-999", str(GUARDED), str(GUARDED)]
    assert int(output[-1], 16) == dac_read_search | sys_resource


def test_a_reload_brings_the_new_configuration_without_a_restart_and_a_wrong_one_changes_nothing(
    running: Machine,
) -> None:
    before = show(running, "MainPID")
    try:
        running.write("/etc/nodeagent/config.yaml", CONFIGURATION.replace("700Mi", "710Mi"))
        running.run("systemctl reload nodeagent.service")
        wait_for_log(running, "710Mi")
        running.write("/etc/nodeagent/config.yaml", CONFIGURATION.replace("700Mi", "lots"))
        running.run("systemctl reload nodeagent.service")
        wait_for_log(running, "configuration rejected")
    finally:
        running.write("/etc/nodeagent/config.yaml", CONFIGURATION)
    wait_until_reloaded(running)
    assert show(running, "MainPID") == before


@on_both
def test_a_reload_returns_when_it_is_done_where_systemd_can_wait_for_it(running: Machine, suite: Suite) -> None:
    """The agent is frozen in its cgroup, where it cannot answer."""
    freezer = "/sys/fs/cgroup/nodeagent.slice/nodeagent.service/cgroup.freeze"
    waits = suite.systemd >= WAITS_FOR_RELOADS
    try:
        frozen = running.run(
            f"echo 1 >{freezer}; timeout {3 if waits else 60} systemctl reload nodeagent.service", check=False
        )
        assert (frozen.returncode == 124) == waits
    finally:
        running.run(f"echo 0 >{freezer}")
    running.run("systemctl reload nodeagent.service")
    if waits:
        assert show(running, "ActiveState") == "active"
    wait_until_reloaded(running)
    assert show(running, "ReloadResult") == "success"


@on_both
def test_its_figures_and_its_health_are_served_on_the_loopback(running: Machine, api: ApiServer) -> None:
    """In the sandbox too. The kubelet of this node is played by the double."""
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 180), journal(running)
    assert [answer(running, path) for path in ("/healthz", "/readyz")] == ["ok\n"] * 2
    scraped = answer(running, "/metrics")
    assert re.search(r'^nodeagent_signal_available_bytes\{signal="memory.available"\} [1-9]\d+$', scraped, re.MULTILINE)
    assert re.search(r'^nodeagent_pressure_stalled_seconds_total\{scope="node"', scraped, re.MULTILINE)
    resident = re.search(r"^process_resident_memory_bytes (\d+)$", scraped, re.MULTILINE)
    assert resident
    assert int(resident[1]) < GUARDED
    if shutil.which("promtool"):
        text = scraped.strip() + "\n"
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_stuck_loop_is_ended_by_the_watchdog_and_started_again(running: Machine) -> None:
    before = show(running, "MainPID")
    restarts = int(show(running, "NRestarts"))
    # A stopped process cannot feed the watchdog, as when its loop hangs. The journal shows when it is back.
    running.run(f"kill -STOP {before}")
    running.run(
        "timeout 200 sh -c 'until journalctl --no-pager --unit=nodeagent.service --since=-2min | grep -q \"Watchdog "
        "timeout\"; do sleep 1; done; until systemctl is-active --quiet nodeagent.service; do sleep 1; done'",
        timeout_s=240,
    )
    assert int(show(running, "NRestarts")) == restarts + 1
    assert show(running, "MainPID") != before


def test_a_crash_loop_continues_until_its_cause_is_gone(running: Machine) -> None:
    """Killed, it comes back; with a configuration that it cannot read it goes on trying."""
    restarts = int(show(running, "NRestarts"))
    running.run(f"kill -KILL {show(running, 'MainPID')}")
    try:
        running.write("/etc/nodeagent/config.yaml", CONFIGURATION.replace("700Mi", "lots"))
        running.run(
            "timeout 200 sh -c 'until test $(systemctl show --value --property=NRestarts nodeagent.service) "
            f"-ge {restarts + 3}; "
            "do sleep 0.5; done'",
            timeout_s=240,
        )
        assert show(running, "ActiveState") == "activating"
    finally:
        running.write("/etc/nodeagent/config.yaml", CONFIGURATION)
    running.run(
        "timeout 150 sh -c 'until systemctl is-active --quiet nodeagent.service; do sleep 0.5; done'", timeout_s=180
    )
    assert '"event":"started"' in journal(running)


@on_both
def test_a_bloated_pod_is_evicted_under_real_pressure_and_its_neighbour_lives(running: Machine, api: ApiServer) -> None:
    running.run("dmesg --clear")  # of the OOM kills of other tests in this machine
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 180), journal(running)
    calm = start_pod(running, "calm", work="hold 48 1")
    bloated = start_pod(running, "bloated", work="ramp 1400 50")
    try:
        ended = threading.Event()

        def as_a_kubelet_does(evicted: Json, body: Json) -> None:
            if evicted["metadata"]["name"] == "bloated":
                kill_pod(running, bloated)
                api.delete_pod("shop", "bloated")
                ended.set()

        api.on_eviction = lambda evicted, body: threading.Thread(target=as_a_kubelet_does, args=(evicted, body)).start()
        for each in (calm, bloated):
            api.add_pod(_object(each))
        assert api.wait_for(lambda: api.sent("POST", "/eviction"), 180), journal(running)
        (request,) = api.sent("POST", "/eviction")
        assert request.path.endswith("/namespaces/shop/pods/bloated/eviction")
        assert request.body["deleteOptions"]["preconditions"]["uid"] == bloated.uid
        assert ended.wait(180)
        assert api.wait_for(lambda: _status(api, "NodeAgentMemoryPressure") == "True", 180), journal(running)
        assert api.wait_for(lambda: _status(api, "NodeAgentMemoryPressure") == "False", 180), journal(running)
        assert running.run(f"cat /sys/fs/cgroup{calm.cgroup}/cgroup.events").stdout.startswith("populated 1")
        assert "oom-kill" not in running.run("dmesg").stdout
    finally:
        api.on_eviction = None
        for each in (calm, bloated):
            kill_pod(running, each)
            with contextlib.suppress(KeyError):
                api.delete_pod("shop", each.name)


def _object(made: VmPod) -> Json:
    """The pod as the API has it."""
    return pod(made.name, namespace=made.namespace, node=NODE, uid=made.uid, qos=made.qos_class)


def _status(api: ApiServer, kind: str) -> str:
    condition = api.condition(kind)
    return condition["status"] if condition else ""


def test_it_stops_within_its_time_and_leaves_no_condition_behind(running: Machine, api: ApiServer) -> None:
    assert api.wait_for(lambda: api.condition("NodeAgentMemoryPressure"), 180), journal(running)
    running.run("systemctl stop nodeagent.service", timeout_s=180)
    assert show(running, "Result") == "success"
    left = api.condition("NodeAgentMemoryPressure")
    assert left is None or left["status"] == "Unknown"


PKI: Final = "/var/lib/kubelet/pki/kubelet-client-current.pem"
"""Where a kubelet keeps its certificate and key, and the contents of kubelet.conf."""


@on_both
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_with_the_nodes_own_credentials_it_publishes_conditions_and_leaves_taints_alone(
    service: Machine, tmp_path: Path
) -> None:
    made = make(tmp_path, address=HOST_LOOPBACK)
    tls = server_context(made, client_certificates=True)
    with ApiServer(node=NODE, user=f"system:node:{NODE}", tls=tls, linger_s=None) as strict:
        conf = json.loads(strict.kubeconfig(tmp_path / "kubelet.conf").read_text(encoding="utf-8"))
        conf["clusters"][0]["cluster"] = {
            "server": strict.url.replace("127.0.0.1", HOST_LOOPBACK),
            "certificate-authority-data": base64.b64encode((made / "ca.crt").read_bytes()).decode(),
        }
        # The double distinguishes users by token only; without the certificate it accepts no connection.
        conf["users"][0]["user"] |= {"client-certificate": PKI, "client-key": PKI}
        service.write(PKI, (made / "client.crt").read_bytes() + (made / "client.key").read_bytes(), mode=0o600)
        service.write("/etc/kubernetes/kubelet.conf", json.dumps(conf), mode=0o600)
        service.write("/etc/nodeagent/config.yaml", f"{CONFIGURATION}conditions: {{taint: false}}\n")
        try:
            service.run(
                "install -D -m 644 -t /etc/systemd/system/nodeagent.service.d "
                "/run/vm/systemd/drop-ins/node-credentials.conf && systemctl daemon-reload"
            )
            service.run("systemctl stop nodeagent.service")
            start(service)
            assert strict.wait_for(lambda: strict.condition("NodeAgentMemoryPressure"), 180), journal(service)
            assert not strict.sent("PATCH", f"/nodes/{NODE}")
        finally:
            service.write("/etc/nodeagent/config.yaml", CONFIGURATION)
            service.run(
                "systemctl stop nodeagent.service; rm -rf /etc/kubernetes /var/lib/kubelet/pki "
                "/etc/systemd/system/nodeagent.service.d/node-credentials.conf; systemctl daemon-reload",
                check=False,
            )


def test_without_its_credentials_it_does_not_start_and_logs_why(service: Machine, tmp_path: Path) -> None:
    service.run("systemctl stop nodeagent.service; mv /etc/nodeagent/kubeconfig /etc/nodeagent/away")
    try:
        assert service.run("systemctl start nodeagent.service", check=False, timeout_s=240).returncode != 0
        assert "CREDENTIALS" in service.run("systemctl status nodeagent.service", check=False).stdout
    finally:
        service.run("mv /etc/nodeagent/away /etc/nodeagent/kubeconfig; systemctl stop nodeagent.service")
