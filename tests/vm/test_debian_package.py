"""The package of systemd/debian/build, installed, upgraded and purged in a machine."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from nodeagent import __version__
from tests.fake_kube import ApiServer
from tests.support import debian_package
from tests.vm.agent_container import BUNDLE
from tests.vm.image import NEWER, OLDER, Suite
from tests.vm.machine import HOST_LOOPBACK, Machine
from tests.vm.published import answer

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(debian_package.why_not()), reason=f"needs the package: {debian_package.why_not()}"),
]
NODE: Final = "vm-node"
EARLIER: Final = "0.0.9"
CONFIG: Final = "/etc/nodeagent/config.yaml"
OWN_THRESHOLD: Final = "evictionHard: {memory.available: 223Mi}"
"""What an administrator adds to the configuration. It is above a kubelet's by more than the agent wants it to be, so
that it stays when the agent has heard of the kubelet."""
DPKG: Final = "dpkg --force-confdef --force-confold --install"
"""As `apt-get -o Dpkg::Options=...` of unattended upgrades: a changed configuration is kept without a question."""


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return debian_package.build(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def earlier_package(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an earlier version and another default configuration."""
    tree = tmp_path_factory.mktemp("earlier")
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True, timeout=120)
    for name, old, new in (
        ("DEBIAN/control", f"Version: {__version__}", f"Version: {EARLIER}"),
        ("etc/nodeagent/config.yaml", "# nodeagent's configuration.", "# The configuration of an earlier version."),
    ):
        text = (tree / name).read_text("utf-8")
        assert old in text
        (tree / name).write_text(text.replace(old, new), "utf-8")
    found = tmp_path_factory.mktemp("packages") / f"nodeagent_{EARLIER}.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(tree), str(found)]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return found


@contextlib.contextmanager
def without_the_unit(machine: Machine) -> Iterator[Machine]:
    """The machine without the unit and the configuration of other tests, which come back afterwards."""
    machine.run(
        "systemctl stop nodeagent.service 2>/dev/null; rm -rf /run/aside && mkdir -p /run/aside/etc && "
        "for each in /etc/systemd/system/nodeagent.* /etc/nodeagent; do test ! -e $each || mv $each /run/aside/etc; "
        "done; systemctl daemon-reload"
    )
    try:
        yield machine
    finally:
        machine.run(
            "dpkg --purge nodeagent; rm -rf /etc/nodeagent; cd /run/aside/etc; test ! -e nodeagent || mv nodeagent "
            "/etc; for each in nodeagent.*; do test ! -e $each || mv $each /etc/systemd/system; done; "
            "systemctl daemon-reload; systemctl reset-failed",
            check=False,
            timeout_s=240,
        )


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node=NODE, linger_s=None) as double:
        yield double


def kubeconfig_of(api: ApiServer, directory: Path) -> str:
    return api.kubeconfig(directory / "kubeconfig").read_text("utf-8").replace("127.0.0.1", HOST_LOOPBACK)


def show(machine: Machine, name: str) -> str:
    return machine.run(f"systemctl show --value --property={name} nodeagent.service").stdout.strip()


def metric(machine: Machine, name: str) -> list[str]:
    """The values of a metric, its labels before each."""
    return [line for line in answer(machine, "/metrics").splitlines() if line.startswith(name)]


def started(machine: Machine) -> str:
    """What the running service has logged since its start, up to its first samples."""
    journal = "journalctl --output=cat --unit=nodeagent.service _SYSTEMD_INVOCATION_ID=" + show(machine, "InvocationID")
    machine.run(f"timeout 120 sh -c 'until {journal} | grep -q \"signal changed\"; do sleep 0.5; done'", check=False)
    return machine.run(journal).stdout


def install_and_start(host: Machine, package: Path, suite: Suite, kubeconfig: str) -> None:
    """It is skipped before it has credentials; then it starts, as a dry run, and can be reloaded."""
    host.copy(package, "/run/deb")
    host.run(f"{DPKG} /run/deb/{package.name}", timeout_s=400)
    assert host.run("dpkg --audit").stdout == ""
    assert (show(host, "UnitFileState"), show(host, "ActiveState")) == ("enabled", "inactive")
    assert (show(host, "ConditionResult"), show(host, "Result")) == ("no", "success")
    compiled = f"/usr/lib/nodeagent/nodeagent/__pycache__/__init__.cpython-{suite.python.replace('.', '')}.pyc"
    host.run(["test", "-e", compiled])
    assert show(host, "Type") == ("notify" if suite == OLDER else "notify-reload")
    host.write("/etc/nodeagent/kubeconfig", kubeconfig, mode=0o600)
    host.run("systemctl start nodeagent.service", timeout_s=240)
    log = started(host)
    assert show(host, "ActiveState") == "active", log
    assert metric(host, "nodeagent_enforcing") == ["nodeagent_enforcing 0"]
    assert '"level":"error"' not in log
    assert "Permission denied" not in log
    host.run("systemctl reload nodeagent.service")


def run_without_root(host: Machine) -> None:
    """A dry run as the package's user, also with a configuration that enforces; and root again without the drop-in."""
    drop_in = "/etc/systemd/system/nodeagent.service.d/non-root.conf"
    host.run(f"sed -i 's/^mode: dry-run$/mode: enforce/' {CONFIG}")
    host.run(f"mkdir -p {drop_in.rpartition('/')[0]} && cp /usr/share/nodeagent/drop-ins/non-root.conf {drop_in}")
    host.run("systemctl daemon-reload && systemctl restart nodeagent.service", timeout_s=240)
    log = started(host)
    assert show(host, "ActiveState") == "active", log
    owners = "stat --format=%U /run/nodeagent /proc/$(systemctl show --value --property=MainPID nodeagent.service)"
    assert host.run(owners).stdout.split() == ["nodeagent", "nodeagent"]
    assert metric(host, "nodeagent_enforcing") == ["nodeagent_enforcing 0"]
    assert '"level":"error"' not in log
    host.run(f"sed -i 's/^mode: enforce$/mode: dry-run/' {CONFIG}; rm {drop_in}; systemctl daemon-reload")
    host.run("systemctl restart nodeagent.service", timeout_s=240)
    assert host.run(owners).stdout.split() == ["root", "root"]


def test_it_is_installed_upgraded_removed_and_purged(
    machine: Machine, api: ApiServer, package: Path, earlier_package: Path, tmp_path: Path
) -> None:
    with without_the_unit(machine) as host:
        install_and_start(host, earlier_package, OLDER, kubeconfig_of(api, tmp_path))
        host.copy(package, "/run/deb")
        host.run(f"echo '{OWN_THRESHOLD}' >>{CONFIG}; chmod 644 /etc/nodeagent/kubeconfig")
        first, since = show(host, "MainPID"), host.run("cat /proc/uptime").stdout.split()[0]
        host.run(f"{DPKG} /run/deb/{package.name}", timeout_s=400)
        assert host.run("nodeagent version").stdout.split()[1] == __version__
        log = started(host)
        assert (show(host, "ActiveState"), show(host, "NRestarts")) == ("active", "0"), log
        assert show(host, "MainPID") != first, "the upgrade restarts the unit"
        assert int(show(host, "ActiveEnterTimestampMonotonic")) > float(since) * 1e6
        threshold = 'nodeagent_threshold_bytes{signal="memory.available",tier="hard"}'
        assert metric(host, threshold) == [f"{threshold} {223 << 20}"], "with the configuration as it was left"
        assert OWN_THRESHOLD in host.run(f"cat {CONFIG}").stdout
        assert host.run("stat --format='%a %U' /etc/nodeagent/kubeconfig").stdout.split() == ["600", "root"]
        assert host.run(f"head -1 {CONFIG}.dpkg-dist").stdout.startswith("# nodeagent's configuration.")
        changes = [request for verb in ("PATCH", "PUT", "DELETE", "POST") for request in api.sent(verb)]
        assert [request.path for request in changes if "reviews" not in request.path] == [], "a dry run sends nothing"

        purge(host)


def test_the_same_package_serves_the_newer_machine(
    newer_machine: Machine, api: ApiServer, package: Path, tmp_path: Path
) -> None:
    with without_the_unit(newer_machine) as host:
        install_and_start(host, package, NEWER, kubeconfig_of(api, tmp_path))
        run_without_root(host)
        purge(host)


def purge(host: Machine) -> None:
    """Removing keeps the configuration, purging leaves nothing."""
    host.run("dpkg --remove nodeagent", timeout_s=240)
    assert show(host, "ActiveState") == "inactive"
    assert "mode: dry-run" in host.run(f"cat {CONFIG}").stdout
    host.run("dpkg --purge nodeagent", timeout_s=240)
    left = host.run(
        "find / -xdev -path /run/aside -prune -o -path /opt -prune -o -path /run/deb -prune -o -path /var/log -prune "
        f"-o -path /run/vm -prune -o -path {BUNDLE} -prune -o -iname '*nodeagent*' -print; ls -d /run/nodeagent",
        check=False,
    )
    assert left.stdout == ""
    assert host.run("getent passwd nodeagent; getent group nodeagent", check=False).stdout == ""
