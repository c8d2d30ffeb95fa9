import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeagent import __version__
from nodeagent.commands import cli, exit_codes
from nodeagent.model import Signal
from tests.fake_kube import ApiServer
from tests.support.paths import REPOSITORY

NODES = REPOSITORY / "tests" / "data" / "nodes"
CALM = NODES / "cgroupv2-calm-8pods"
FULL = NODES / "cgroupv2-imagefs-pressure"

HEAVY = (
    "dataclasses",
    "inspect",
    "json",
    "kubernetes",
    "logging",
    "msgspec",
    "pyroute2",
    "rich",
    "structlog",
    "yaml",
)


def environment(**changes: str) -> dict[str, str]:
    """Ours without what would send `check` to a cluster, or change its colours."""
    dropped = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME", "NODEAGENT_MODE", "NO_COLOR", "COLUMNS", "HOME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "error", **changes}


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    # -P: the code under test is that of PYTHONPATH, wherever the tests are run from.
    command = [sys.executable, "-P", "-m", "nodeagent", *arguments]
    variables = environment(**changes)
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("KUBECONFIG", "NODE_NAME", "NODEAGENT_MODE"):
        monkeypatch.delenv(name, raising=False)
    return ["check", "--host-root", str(CALM)]


# --- check -----------------------------------------------------------------------------------------------------------


def test_check_reports_this_machine_with_every_signal_and_a_documented_exit_code() -> None:
    done = run("check", "--no-api")
    assert done.stderr == ""
    assert done.returncode in (0, 1, 2, 3)
    assert done.stdout.split()[0] == ("OK", "SOFT", "HARD", "UNKNOWN")[done.returncode]
    for name in ("memory.available", "nodefs.inodesFree", "pid.available", "memavailable"):
        assert name in done.stdout


def test_the_environment_names_the_host_root_and_the_configuration_of_a_pod(tmp_path: Path) -> None:
    """As `kubectl exec POD -- nodeagent check`: the container's own root would be another machine."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionHard: {memory.available: 123Mi}\n"
    )
    variables = {"NODEAGENT_HOST_ROOT": str(CALM), "NODEAGENT_CONFIG": str(config)}
    report = run("check", "--no-api", **variables).stdout
    assert "default/hog-guaranteed" in report
    assert "123Mi" in report
    assert 'memory.available: "123Mi"' in run("config", "show", **variables).stdout
    given = run("config", "show", "--config", str(config), NODEAGENT_CONFIG="/nonexistent")
    assert 'memory.available: "123Mi"' in given.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; the tests of any other run as one")
def test_check_works_for_any_user() -> None:
    # The first report imports everything, so that the second does not depend on the rights to this checkout.
    script = (
        "import os\n"
        "from nodeagent.commands import cli\n"
        "cli.main(['check', '--no-api'])\n"
        "os.setgroups([])\n"
        "os.setresgid(65534, 65534, 65534)\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "print('WITHOUT ROOT')\n"
        "raise SystemExit(cli.main(['check', '--no-api']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.returncode in (0, 1, 2, 3)
    report = done.stdout.partition("WITHOUT ROOT\n")[2]
    assert re.search(r"^memory\.available +\d", report, re.MULTILINE)
    assert "CONDITIONS THAT WOULD BE PUBLISHED" in report


def test_check_of_a_calm_node_is_0_and_of_one_with_a_full_disk_2(calm: list[str]) -> None:
    assert cli.main(calm) == 0
    assert cli.main(["check", "--host-root", str(FULL)]) == 2


def test_check_of_an_empty_root_is_3_and_lists_what_is_unreadable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--no-api", "--host-root", str(tmp_path), "--node-name", "empty"]) == 3
    shown = capsys.readouterr()
    assert shown.out.startswith("UNKNOWN empty: memory.available is unknown (")
    assert "No pods on this machine." in shown.out
    assert shown.err == ""


def test_json_and_yaml_are_the_same_object(calm: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert cli.main([*calm, "-o", "json"]) == 0
    from_json = json.loads(capsys.readouterr().out)
    assert cli.main([*calm, "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == from_json
    assert from_json["kind"] == "NodeReport"


def test_real_requests_come_from_a_pod_list(calm: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*calm, "-o", "json", "--pods", str(CALM / "api" / "pods.json")]) == 0
    pods = {pod["name"]: pod for pod in json.loads(capsys.readouterr().out)["pods"]}
    assert pods["hog-guaranteed"]["memoryRequestBytes"] == 300 << 20
    assert pods["hog-guaranteed"]["sources"]["memoryRequestBytes"] == "api"


def test_check_with_text_output_imports_no_heavy_module() -> None:
    script = (
        "import sys\n"
        "from nodeagent.commands import cli\n"
        "cli.main(['check', '--no-api'])\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    if "KUBELET (" in done.stdout:
        pytest.skip("this machine has a kubelet, whose configuration is YAML")
    assert done.stderr == "[]\n"


def test_check_writes_a_page_beside_its_report(
    calm: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert cli.main([*calm, "--html", str(page)]) == exit_codes.OK
    assert capsys.readouterr().out.startswith("OK ")
    written = page.read_text("utf-8")
    assert "PODS IN EVICTION ORDER FOR memory.available" in written
    assert "Available, against the thresholds" in written


def test_check_writes_only_a_page_to_standard_output(calm: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*calm, "--html", "-"]) == exit_codes.OK
    shown = capsys.readouterr().out
    assert shown.startswith("<!DOCTYPE html>")
    assert shown.endswith("</html>\n")


@pytest.mark.parametrize("other", [["-o", "json"], ["--watch"], ["--rights"]])
def test_a_page_on_standard_output_has_nothing_beside_it(
    calm: list[str], other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*calm, "--html", "-", *other]) == exit_codes.USAGE
    assert "cannot be combined with" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_one_line(calm: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*calm, "--html", "/proc/page.html"]) == exit_codes.UNKNOWN
    assert capsys.readouterr().err.startswith("nodeagent: --html /proc/page.html: ")


def test_watching_prints_one_json_object_a_line_until_ctrl_c() -> None:
    watch = [sys.executable, "-m", "nodeagent", "check", "--host-root", str(CALM), "--watch", "0.1", "-o", "json"]
    # A suite that a shell runs in the background has Ctrl-C ignored, which its children inherit.
    command = ["env", "--default-signal=INT", *watch]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == ""
    assert process.returncode == exit_codes.INTERRUPTED
    assert first["node"] == second["node"] == "lab-node"


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "nodeagent", "check", "--host-root", str(CALM)]
    try:
        done = subprocess.run(
            command, env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert done.stderr == ""


# --- terminals -------------------------------------------------------------------------------------------------------


@contextmanager
def _terminal(columns: int) -> Iterator[tuple[int, int]]:
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    try:
        yield master, slave
    finally:
        os.close(master)


def on_terminal(*arguments: str, columns: int = 200, **changes: str) -> str:
    """What a terminal of this width is sent."""
    command = [sys.executable, "-m", "nodeagent", *arguments]
    variables = environment(**{"TERM": "xterm-256color", **changes})
    with _terminal(columns) as (master, slave):
        process = subprocess.Popen(command, env=variables, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        received = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # EIO: the last writer has gone
                break
            if not data:
                break
            received += data
        process.wait(timeout=60)
    return received.decode()


ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def test_a_terminal_gets_colours_and_bars_in_its_width() -> None:
    shown = on_terminal("check", "--host-root", str(FULL), columns=160)
    assert "\x1b[1;31m" in shown  # bold red: hard
    assert "\u2588" in shown
    plain = ESCAPES.sub("", shown)
    assert "imagefs.available" in plain
    assert max(map(len, plain.splitlines())) <= 160


def test_a_report_under_pressure_has_the_reason_why_no_pod_would_be_evicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--host-root", str(FULL)]) == exit_codes.HARD
    reason = "the API server has not listed the pods of this node yet"
    assert f"\nNo pod would be evicted: {reason}.\n" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_narrow_terminal_shows_every_name_in_one_piece(columns: int) -> None:
    plain = ESCAPES.sub("", on_terminal("check", "--host-root", str(FULL), columns=columns))
    assert max(map(len, plain.splitlines())) <= columns
    names = ("STATE", "RELIEF", "NodeAgentHasSufficientMemory", "default/quiet", "/system.slice/kubelet.service")
    for name in (*Signal, *names):
        assert name in plain
    lines = plain.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("pid.available"))
    assert "soft for 30s" in lines[first]
    assert any("/proc/sys/kernel/threads-max" in line for line in lines[first : first + 6])


def test_no_color_and_dumb_terminals_are_respected() -> None:
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", on_terminal("check", "--host-root", str(FULL), NO_COLOR="1"))
    assert "\x1b" not in on_terminal("check", "--host-root", str(FULL), TERM="dumb")
    assert "\x1b" not in on_terminal("check", "--host-root", str(FULL), "--color", "never")


def test_colour_can_be_forced_in_a_pipe() -> None:
    assert "\x1b[1;31m" in run("check", "--host-root", str(FULL), "--color", "always", NO_COLOR="1").stdout
    assert "\x1b" not in run("check", "--host-root", str(FULL)).stdout


# --- expected failures: one line, the right code, no traceback -------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["chekc"],
        ["check", "--nonsense"],
        ["check", "-o", "xml"],
        ["check", "--watch", "0"],
        ["check", "--watch", "nan"],
        ["check", "--signal", "memory.free"],
        ["check", "--signal", "containerfs.available"],
        ["check", "--host-root", "/does/not/exist"],
        ["run", "--once", "--host-root", "/does/not/exist"],
        ["config"],
        ["completion", "powershell"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_64_and_never_the_code_of_hard_pressure(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == exit_codes.USAGE
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("nodeagent")


def test_a_wrong_configuration_is_78_and_names_file_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionHrad: {}\n")
    for command in (["check", "--config", str(file)], ["config", "show", "--config", str(file)]):
        done = run(*command)
        assert done.returncode == exit_codes.CONFIG
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"nodeagent: {file}:3:")
        assert "evictionHard" in line  # the suggestion


def test_a_missing_configuration_and_a_broken_pod_list_are_reported_in_one_line(tmp_path: Path) -> None:
    done = run("check", "--config", str(tmp_path / "none.yaml"))
    assert (done.returncode, len(done.stderr.splitlines())) == (exit_codes.CONFIG, 1)
    broken = tmp_path / "pods.json"
    broken.write_text('{"items": [')
    done = run("check", "--host-root", str(CALM), "--pods", str(broken))
    assert (done.returncode, done.stdout) == (exit_codes.UNKNOWN, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"nodeagent: --pods {broken}: is no PodList in JSON")
    broken.write_text('{"kind": "Pod", "metadata": {"name": "web"}, "spec": {}}')  # kubectl get pod web -o json
    done = run("check", "--host-root", str(CALM), "--pods", str(broken))
    assert (done.returncode, done.stdout) == (exit_codes.UNKNOWN, "")
    assert "is no PodList in JSON (kubectl get pods -o json) but a Pod" in done.stderr


def test_a_demanded_api_without_credentials_is_an_error_and_an_offered_one_is_not(tmp_path: Path) -> None:
    demanded = run("check", "--api", "always", HOME=str(tmp_path))
    assert (demanded.returncode, demanded.stdout) == (exit_codes.UNKNOWN, "")
    assert "no kubeconfig" in demanded.stderr or "no --kubeconfig" in demanded.stderr
    offered = run("check", HOME=str(tmp_path))
    assert offered.stderr == ""
    assert "pods: this host alone" in offered.stdout


def test_an_api_that_does_not_answer_leaves_a_report_of_the_host_with_a_note(tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    done = run("check", "--kubeconfig", str(config))
    assert done.stderr == ""
    assert "pods: this host alone, the API server did not answer" in done.stdout
    assert re.search(r"^api: ", done.stdout, re.MULTILINE)
    assert run("check", "--kubeconfig", str(config), "--api", "always").returncode == exit_codes.UNKNOWN


def test_a_defect_is_70_with_its_traceback_and_never_the_code_of_soft_pressure(tmp_path: Path) -> None:
    # A package that cannot be imported, as in a broken installation.
    broken = tmp_path / "nodeagent"
    shutil.copytree(REPOSITORY / "nodeagent", broken)
    (broken / "policy" / "engine.py").write_text("raise RuntimeError('broken')\n")
    done = run("check", "--no-api", PYTHONPATH=str(tmp_path))
    assert done.returncode == exit_codes.INTERNAL
    assert done.stderr.endswith("RuntimeError: broken\n")


def test_in_the_kubelets_mode_a_check_reports_what_a_kubelet_would_do_and_write(tmp_path: Path) -> None:
    recorded = REPOSITORY / "tests" / "data" / "nodes" / "cgroupv2-memory-pressure"
    config = (REPOSITORY / "examples" / "kubelet-compatible.yaml").read_text(encoding="utf-8")
    (tmp_path / "kubelet.yaml").write_text(config.replace("100Mi", "900Mi", 1), encoding="utf-8")
    files = ("--config", str(tmp_path / "kubelet.yaml"), "--pods", str(recorded / "api" / "pods.json"))
    done = run("check", "--host-root", str(recorded), *files, "-o", "json")
    assert (done.returncode, done.stderr) == (exit_codes.HARD, "")
    report = json.loads(done.stdout)
    assert report["victims"] == [
        {
            "namespace": "default",
            "name": "hog-besteffort",
            "uid": "0b073eb9-3877-43ca-878b-c9ee8dae71bc",
            "tier": "hard",
            "gracePeriodSeconds": 1.0,
            "message": "The node was low on resource: memory. Threshold quantity: 900Mi, available: 351188Ki. "
            "Container c was using 1640784Ki, request is 0, has larger consumption of memory. ",
            "annotations": {
                "starved_resource": "memory",
                "offending_containers": "c",
                "offending_containers_usage": "1640784Ki",
            },
        }
    ]
    first = report["pods"][0]
    assert [key["name"] for key in first["keys"]] == ["exceedsRequest", "priority", "usageOverRequest"]
    condition = next(each for each in report["conditions"] if each["type"] == "MemoryPressure")
    assert condition["status"] == "True"


# --- with an API -----------------------------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    pods = json.loads((CALM / "api" / "pods.json").read_text(encoding="utf-8"))["items"]
    with ApiServer(node="lab-node", pods=pods) as server:
        server.kubeconfig(tmp_path / "kubeconfig")
        yield server


def test_with_an_api_pods_have_real_requests_and_every_fact_its_source(api: ApiServer, tmp_path: Path) -> None:
    options = ("--host-root", str(CALM), "--kubeconfig", str(tmp_path / "kubeconfig"), "--api", "always")
    done = run("check", *options, "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["podsSource"].startswith("the API server ")
    pod = next(pod for pod in report["pods"] if pod["name"] == "hog-burstable-high")
    assert (pod["memoryRequestBytes"], pod["priority"]) == (100 << 20, 100000)
    assert (pod["sources"]["memoryRequestBytes"], pod["sources"]["memoryWorkingSetBytes"]) == ("api", "host")
    read = [request for request in api.requests if not request.path.endswith("reviews")]
    assert {request.method for request in read} == {"GET"}
    assert read[-1].query["fieldSelector"] == "spec.nodeName=lab-node"


def test_a_check_reports_node_bound_pods_and_failed_volume_lookups(api: ApiServer, tmp_path: Path) -> None:
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    api.set_volume("data", {"local": {"path": "/mnt/disk1"}})
    api.modify_pod("default", "hog-guaranteed", lambda pod: pod["spec"].setdefault("volumes", []).append(volume))
    options = ("check", "--host-root", str(CALM), "--kubeconfig", str(tmp_path / "kubeconfig"), "--api", "always")
    assert "its claim data is on the local PersistentVolume pv-data" in run(*options).stdout
    api.forbid("get", "persistentvolumeclaims")
    output = run(*options).stdout
    assert "may be bound to this node" in output
    assert re.search(r"^volumes: .*forbidden", output, re.MULTILINE)
    file = tmp_path / "pods.json"
    file.write_text(json.dumps({"metadata": {}, "items": [api.get_pod("default", "hog-guaranteed")]}), encoding="utf-8")
    output = run("check", "--host-root", str(CALM), "--pods", str(file)).stdout
    assert re.search(r"^volumes: .*mount claims: 1$", output, re.MULTILINE)


def test_with_node_credentials_a_check_reports_that_taints_cannot_be_changed(api: ApiServer, tmp_path: Path) -> None:
    config = tmp_path / "nodeagent.yaml"
    config.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nmode: enforce\n", encoding="utf-8"
    )
    files = ("--kubeconfig", str(tmp_path / "kubeconfig"), "--config", str(config))
    options = ("check", "--host-root", str(CALM), "--api", "always", *files)
    assert "cannot change taints" not in run(*options).stdout
    api.tokens[api.token] = "system:node:lab-node"
    assert "cannot change taints" in run(*options).stdout


def test_a_check_shows_whose_rights_it_has_used(api: ApiServer, tmp_path: Path) -> None:
    options = ("check", "--host-root", str(CALM), "--kubeconfig", str(tmp_path / "kubeconfig"), "--api", "always")
    assert "system:node" not in run(*options).stdout
    api.token_nodes[api.token] = "lab-node"
    assert f"pods: the API server {api.url}, as system:node:lab-node\n" in run(*options).stdout
    api.constrained_impersonation = False
    output = run(*options).stdout
    assert f"pods: the API server {api.url}\n" in output
    assert re.search(
        r"^identity: list pods sent as the ServiceAccount: .* no constrained impersonation", output, re.MULTILINE
    )
    api.token_nodes[api.token] = "other-node"
    assert not re.search(r"^identity: ", run(*options).stdout, re.MULTILINE)
    config = tmp_path / "node.yaml"
    config.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\ncluster: {identity: node}\n", encoding="utf-8"
    )
    refused = run(*options, "--config", str(config))
    assert refused.returncode == exit_codes.UNKNOWN
    assert "cluster.identity is node, but the token is of no pod on lab-node" in refused.stderr


def test_an_api_that_forbids_the_list_is_a_note_or_with_always_an_error(api: ApiServer, tmp_path: Path) -> None:
    api.forbid("list", "pods")
    options = ("check", "--kubeconfig", str(tmp_path / "kubeconfig"), "--node-name", "lab-node")
    offered = run(*options)
    assert offered.stderr == ""
    assert re.search(r"^api: .*forbidden", offered.stdout, re.MULTILINE)
    demanded = run(*options, "--api", "always")
    assert (demanded.returncode, demanded.stdout) == (exit_codes.UNKNOWN, "")
    assert "forbidden" in demanded.stderr


# --- config, version, completion, help -------------------------------------------------------------------------------


def test_validate_prints_every_error_of_every_file_and_exits_1(tmp_path: Path) -> None:
    header = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(header + 'evictionHard: {memory.available: "300Mi"}\n')
    bad.write_text(header + 'evictionHard: {memory.available: "-1"}\nmode: maybe\n')
    done = run("config", "validate", str(good), str(bad))
    assert done.returncode == 1
    assert done.stdout == f"{good}: valid\n"
    assert f"{bad}:3:" in done.stderr
    assert f"{bad}:4:" in done.stderr
    assert run("config", "validate", str(good)).returncode == 0


def test_validate_reads_the_configuration_in_a_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text((REPOSITORY / "daemonset.yaml").read_text())
    done = run("config", "validate", str(manifest))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{manifest}: ConfigMap nodeagent, data.config.yaml: valid\n"
    text = manifest.read_text().replace("    mode: enforce\n", "    mode: enforced\n")
    manifest.write_text(text)
    line = text.splitlines().index("    mode: enforced") + 1
    done = run("config", "validate", str(manifest))
    assert done.returncode == 1
    assert done.stderr.startswith(f'{manifest}:{line}:11: ConfigMap nodeagent, data.config.yaml: mode: "enforced"')


def test_show_prints_the_effective_configuration_that_validates_again(tmp_path: Path) -> None:
    shown = run("config", "show")
    assert shown.returncode == 0
    file = tmp_path / "shown.yaml"
    file.write_text(shown.stdout)
    assert run("config", "validate", str(file)).returncode == 0
    assert json.loads(run("config", "show", "-o", "json").stdout)["kind"] == "NodeAgentConfiguration"


def test_the_schema_of_the_configuration_is_json() -> None:
    assert json.loads(run("config", "schema").stdout)["title"] == "NodeAgentConfiguration"


def test_version_is_the_packages() -> None:
    assert run("version").stdout == run("--version").stdout == f"nodeagent {__version__}\n"


def test_completion_is_a_script_that_the_shell_accepts() -> None:
    script = run("completion", "bash").stdout
    assert "check" in script
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_teaches_examples_and_exit_codes() -> None:
    for command in ([], ["check"]):
        shown = run(*command, "--help")
        assert shown.returncode == 0
        assert "examples:" in shown.stdout
        assert exit_codes.as_text() in shown.stdout


@pytest.mark.parametrize("file", ["README.md", "docs/report.md"])
def test_the_table_of_exit_codes_is_the_same_everywhere(file: str) -> None:
    assert exit_codes.as_markdown() in (REPOSITORY / file).read_text(encoding="utf-8")


def test_the_readmes_table_of_defaults_is_the_codes() -> None:
    from nodeagent.config import defaults

    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for name, hard in defaults.EVICTION_HARD.items():
        soft, grace_s = defaults.EVICTION_SOFT[name], defaults.EVICTION_SOFT_GRACE_PERIOD[name]
        kubelets = defaults.KUBELET_EVICTION_HARD.get(name)
        row = f"| `{name}` | {hard.text} | {soft.text} for {grace_s:.0f}s | {kubelets.text if kubelets else 'none'} |"
        assert row in readme


def test_the_picture_in_the_readme_is_a_real_report(calm: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    picture = re.search(r"<!-- picture -->\n```\n(.*?)```", readme, re.DOTALL)
    assert picture
    node = NODES / "cgroupv2-memory-pressure"
    cli.main(["check", "--host-root", str(node), "--pods", str(node / "api" / "pods.json")])
    real = capsys.readouterr().out.splitlines()
    # Wide lines end in dots there, sections are left out; what is shown is word for word.
    for line in picture[1].splitlines():
        shown = line.removesuffix("...")
        assert any(each.startswith(shown) if shown != line else each == line for each in real), line


@pytest.mark.parametrize(
    ("options", "node", "why"),
    [
        (["--disk"], CALM, "--disk"),
        (["--signal", "nodefs.available"], CALM, "--signal nodefs.available"),
        (["--signal", "imagefs.inodesFree"], CALM, "--signal imagefs.inodesFree"),
        ([], FULL, "imagefs.available is short"),
    ],
)
def test_a_recording_reports_in_one_line_that_disks_cannot_be_measured(
    options: list[str], node: Path, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--host-root", str(node), *options]) in (0, 2)
    shown = capsys.readouterr().out
    line = f"disks: {why}: disk usage cannot be measured, a recording contains no files of pods"
    assert shown.splitlines().count(line) == 1
    assert "not measured yet" not in shown
    assert "pods 0" not in shown
    if "--signal" in options:
        assert f"PODS IN EVICTION ORDER FOR {options[1]} (" in shown


def test_a_recording_without_a_reason_for_a_walk_has_no_disk_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--host-root", str(CALM), "--signal", "memory.available"]) == 0
    assert "cannot be measured" not in capsys.readouterr().out
