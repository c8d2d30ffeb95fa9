"""Whatever a user names, however a command is started: an answer in time, one clear error, a documented exit code."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from nodeagent.config.yaml_nodes import MAX_CONFIG_BYTES
from tests.fake_kube import ApiServer
from tests.support.paths import REPOSITORY

CALM = REPOSITORY / "tests" / "data" / "nodes" / "cgroupv2-calm-8pods"
HEADER = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
LIMIT_S = 20.0
"""A command takes a tenth of a second here, and a suite shares its cores; what hangs takes for ever."""


def environment(**changes: str) -> dict[str, str]:
    """Ours without what would send a command to a cluster or change its output."""
    dropped = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME", "NODEAGENT_MODE", "NO_COLOR", "COLUMNS", "HOME")
    proxies = (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "http_proxy",
        "https_proxy",
        "NO_PROXY",
        "no_proxy",
        "ALL_PROXY",
        "all_proxy",
    )
    kept = {name: value for name, value in os.environ.items() if name not in (*dropped, *proxies)}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **changes}


def nodeagent(*arguments: str, redirect: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The command by way of a shell, which can close streams."""
    words = [sys.executable, "-P", "-m", "nodeagent", *arguments]
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *words]
    return subprocess.run(
        command,
        env=environment(**variables),
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=LIMIT_S,
        check=False,
    )


# --- files that are none ----------------------------------------------------------------------------------------------


def _directory(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


SPECIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "a named pipe": (os.mkfifo, "it is a named pipe, not a regular file"),
    "a link to a named pipe": (lambda path: _linked(path, os.mkfifo), "it is a named pipe, not a regular file"),
    "a socket": (_socket, "it is a socket, not a regular file"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "it is a character device, not a regular file"),
    "a terminal": (lambda path: path.symlink_to("/dev/tty"), "it is a character device, not a regular file"),
    "a directory": (_directory, "Is a directory"),
}


def _linked(path: Path, make: Callable[[Path], None]) -> None:
    make(path.with_name("target"))
    path.symlink_to(path.with_name("target"))


@pytest.fixture(params=sorted(SPECIAL))
def special(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A path that is not a regular file, and the message about it."""
    make, message = SPECIAL[request.param]
    directory = tmp_path / "special"
    directory.mkdir()
    path = directory / "named"
    make(path)
    return path, message


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("check", "--no-api", "--config"), 78),
        (("run", "--once", "--dry-run", "--config"), 78),
        (("config", "show", "--config"), 78),
        (("config", "validate"), 1),
        (("explain", "--config"), 78),
        (("replay", "/nowhere", "--config"), 78),
        (("check", "--host-root", str(CALM), "--pods"), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_path_that_is_not_a_regular_file_is_rejected_by_name_without_waiting(
    command: tuple[str, ...], code: int, special: tuple[Path, str]
) -> None:
    path, message = special
    done = nodeagent(*command, str(path))
    assert done.returncode == code, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if str(path) in line]
    assert message in line


def test_a_path_that_is_not_a_file_of_records_is_rejected_by_name(special: tuple[Path, str], tmp_path: Path) -> None:
    path, message = special
    config = tmp_path / "config.yaml"
    config.write_text(HEADER)
    for command in (("explain", "--state-dir", str(path)), ("replay", str(path), "--config", str(config))):
        done = nodeagent(*command)
        if path.is_dir():
            assert done.returncode in (0, 3)  # a state directory without records
            continue
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.count("\n") == 1
        assert str(path) in done.stderr
        assert message in done.stderr


def test_a_state_directory_of_special_files_does_not_stop_the_agent(tmp_path: Path) -> None:
    """Those of the agent itself, its temporary files among them: what stands in their place is replaced."""
    state = tmp_path / "state"
    state.mkdir()
    for name in ("state", "state.new", "status", "status.new", "decisions.jsonl", "decisions.1.jsonl"):
        os.mkfifo(state / name)
    config = tmp_path / "config.yaml"
    config.write_text(f"{HEADER}stateDir: {state}\nlogging: {{format: json}}\nmetrics: {{address: ''}}\n")
    assert nodeagent("check", "--no-api", "--config", str(config)).returncode in (0, 1, 2, 3)
    done = nodeagent("explain", "--config", str(config))
    assert (done.returncode, done.stdout) == (3, "")
    assert "named pipe" in done.stderr
    ran = nodeagent("run", "--once", "--dry-run", "--config", str(config))
    assert (ran.returncode, ran.stderr) == (0, "")
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    [loaded] = [event for event in events if event["event"] == "state loaded"]
    assert loaded["trust"] == "corrupt"
    assert "named pipe" in loaded["message"]
    assert (state / "state").is_file()


def test_a_kubelet_configuration_that_is_a_pipe_is_reported_unreadable_in_time(tmp_path: Path) -> None:
    root = tmp_path / "host"
    (root / "var/lib/kubelet").mkdir(parents=True)
    os.mkfifo(root / "var/lib/kubelet/config.yaml")
    assert nodeagent("check", "--no-api", "--host-root", str(root)).returncode == 3


@pytest.mark.parametrize("key", ["certificate-authority", "kubeconfig"])
def test_a_pipe_among_the_credentials_is_rejected_in_time(key: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    kubeconfig = pipe
    if key != "kubeconfig":
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(_kubeconfig("https://127.0.0.1:1", f"{key}: {pipe}"))
    done = nodeagent("check", "--api", "always", "--kubeconfig", str(kubeconfig))
    assert (done.returncode, done.stdout) == (3, "")
    assert str(pipe) in done.stderr
    assert done.stderr.count("\n") == 1


# --- large and cunning files ------------------------------------------------------------------------------------------


def _flow(names: Iterator[str]) -> str:
    return "[" + ",".join(names) + "]"


def _bomb() -> str:
    """2,000 unknown keys, each of 50,000 times."""
    keys = ",".join(f"k{number}: 1" for number in range(2000))
    return f"x: &a {{{keys}}}\nreclaim:\n  actions: {_flow('*a' for _ in range(50_000))}\n"


LARGE = {
    "labels": f"protection:\n  labels: {_flow(f'k{number}' for number in range(26_000))}\n",
    "the same label": f"protection:\n  labels: {_flow('same' for _ in range(26_000))}\n",
    "bad labels": f"protection:\n  labels: {_flow('/' for _ in range(26_000))}\n",
    "unknown keys": "".join(f"x{number}: 1\n" for number in range(26_000)),
    "nearly known keys": "".join(f"mode{number}: 1\n" for number in range(20_000)),
    "one key again and again": "mode: dry-run\n" * 15_000,
    "unknown signals": "evictionHard:\n" + "".join(f"  m{number}: 1\n" for number in range(20_000)),
    "many actions": "reclaim:\n  actions:\n"
    + "".join(f"  - {{name: a{number}, command: [/bin/x]}}\n" for number in range(5_000)),
    "a long number": f"evictionHard:\n  memory.available: '{'9' * 200_000}'\n",
    "a long duration": f"evictionPressureTransitionPeriod: '{'1h' * 100_000}'\n",
    "a long label": f"protection:\n  labels: ['{'a' * 200_000}!']\n",
    "a long node name": f"nodeName: {'a-' * 100_000}\n",
    "much white space": f"mode:{' ' * 200_000}dry-run\n",
    "aliases of aliases": "".join(
        f"x{number}: &x{number} {_flow(f'*x{number - 1}' if number else 'lol' for _ in range(9))}\n"
        for number in range(12)
    ),
    "a map many times": _bomb(),
    "many profiles": f"protection:\n  labels: {_flow(f'k{number}' for number in range(20_000))}\nprofiles:\n"
    + "".join(f"- {{name: p{number}, nodeSelector: {{pool: p{number}}}}}\n" for number in range(32)),
    "profiles that all match together": "profiles:\n"
    + "".join(f"- {{name: p{number}, nodeSelector: {{l{number}: x}}}}\n" for number in range(5_000)),
    "a deep map": "a: " + "{a: " * 5000 + "\n",
}


@pytest.mark.parametrize("what", sorted(LARGE))
def test_a_large_configuration_is_validated_in_a_second_of_cpu(what: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(HEADER + LARGE[what])
    assert file.stat().st_size <= MAX_CONFIG_BYTES, "or it is refused for its size alone"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = nodeagent("config", "validate", str(file))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr
    assert after.ru_utime - before.ru_utime < 3.0, "11 to 14 s with a search for each value among all before it"


def test_a_manifest_of_many_configurations_is_validated_in_time(tmp_path: Path) -> None:
    file = tmp_path / "manifest.yaml"
    entries = "".join(f"  k{number}: |\n    kind: NodeAgentConfiguration\n" for number in range(5000))
    file.write_text(f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: many}}\ndata:\n{entries}")
    done = nodeagent("config", "validate", str(file))
    assert done.returncode == 1
    assert "more than 100 configurations in one file" in done.stderr


# --- names that are not UTF-8 -----------------------------------------------------------------------------------------


def test_a_cgroup_whose_name_is_not_utf_8_is_reported_in_every_form(tmp_path: Path) -> None:
    root = Path(shutil.copytree(CALM, tmp_path / "node", symlinks=True))
    groups = os.fsencode(root) + b"/sys/fs/cgroup"
    heaviest = max(
        (path for path in Path(os.fsdecode(groups)).iterdir() if (path / "memory.current").exists()),
        key=lambda path: int((path / "memory.current").read_text()),
    )
    os.rename(os.fsencode(heaviest), groups + b"/caf\xe9\xff.slice")
    objects = []
    for form, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        done = nodeagent("check", "--host-root", str(root), "-o", form)
        assert done.returncode in (0, 1, 2, 3), done.stderr
        assert done.stderr == ""
        objects.append(read(done.stdout))
    assert objects[0] == objects[1]
    assert r"caf\udce9\udcff.slice" in json.dumps(objects[0]).replace("\\\\", "\\")
    done = nodeagent("check", "--host-root", str(root))
    assert (done.returncode in (0, 1, 2, 3), done.stderr) == (True, "")


NAME = "\u0443\u0437\u0435\u043b"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_characters_that_the_terminal_cannot_encode_are_escaped(encoding: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(CALM, tmp_path / NAME, symlinks=True))
    done = nodeagent("check", "--host-root", str(root), "--config", str(tmp_path / NAME), PYTHONIOENCODING=encoding)
    assert done.returncode == 78
    config = tmp_path / f"{NAME}.yaml"
    config.write_text(f"{HEADER}mode: dry-run\n")
    for command in (
        ("check", "--host-root", str(root), "--config", str(config)),
        ("check", "--host-root", str(root), "--config", str(config), "--color", "always"),
        ("config", "validate", str(config)),
        ("config", "show", "--config", str(config)),
    ):
        done = nodeagent(*command, PYTHONIOENCODING=encoding)
        assert done.returncode in (0, 1, 2, 3)
        assert done.stderr == ""
        assert r"\u0443\u0437\u0435\u043b" in done.stdout


# --- standard streams -------------------------------------------------------------------------------------------------

COMMANDS = {
    ("version",): 0,
    ("--help",): 0,
    ("no-such-command",): 64,
    ("check", "--host-root", str(CALM)): 0,
    ("check", "--host-root", str(CALM), "-o", "json"): 0,
    ("check", "--host-root", str(CALM), "--color", "always"): 0,
    ("config", "show"): 0,
    ("config", "schema"): 0,
    ("config", "validate", "/nowhere"): 1,
    ("explain", "--state-dir", "/nowhere"): 3,
    ("run", "--once", "--dry-run", "--host-root", str(CALM), "--config", "CONFIG"): 0,
}


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(f"{HEADER}stateDir: {tmp_path / 'state'}\nmetrics: {{address: ''}}\n")
    return str(path)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_standard_stream_is_like_dev_null(command: tuple[str, ...], closed: str, config_file: str) -> None:
    words = [config_file if word == "CONFIG" else word for word in command]
    done = nodeagent(*words, redirect=closed)
    assert done.returncode == COMMANDS[command], done.stderr
    assert "Traceback" not in done.stderr
    if closed == "2>&-" and COMMANDS[command] == 0:
        assert done.stdout


def test_no_opened_file_gets_the_number_of_a_closed_stream(config_file: str) -> None:
    """Such as a report that is written into the connection to the API server."""
    script = (
        "import os, sys\n"
        "from nodeagent.commands import cli\n"
        "sys.argv = ['nodeagent', 'version']\n"
        "code = cli.main()\n"
        "names = [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]\n"
        "number = os.open('/proc/self/stat', os.O_RDONLY)\n"
        "inherited = [os.get_inheritable(fd) for fd in (0, 1, 2)]\n"
        f"open({config_file!r}, 'w').write(f'{{names}} {{number > 2}} {{inherited}}')\n"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script]
    subprocess.run(command, env=environment(), timeout=LIMIT_S, check=True)
    assert Path(config_file).read_text() == f"{['/dev/null'] * 3} True {[True] * 3}"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [each for each, code in COMMANDS.items() if code == 0 and each[0] != "run"])
def test_a_full_disk_behind_standard_output_is_one_line_and_exit_code_3(
    command: tuple[str, ...], unbuffered: str
) -> None:
    done = nodeagent(*command, redirect=">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 3
    assert done.stderr == "nodeagent: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("streams", ["", "2>&1"])
@pytest.mark.parametrize("command", [each for each in COMMANDS if each[0] != "run"])
def test_a_reader_that_closes_its_end_changes_no_exit_code(command: tuple[str, ...], streams: str) -> None:
    words = [sys.executable, "-P", "-m", "nodeagent", *command]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {streams}', "sh", *words],
            env=environment(),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.returncode == COMMANDS[command]
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_watch_ends_when_its_reader_closes_its_end() -> None:
    command = f"{sys.executable} -P -m nodeagent check --host-root {CALM} --watch 0.1 | head -1"
    began = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", command], env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout.startswith("OK ")
    assert done.stderr == ""
    assert time.monotonic() - began < LIMIT_S


# --- the environment --------------------------------------------------------------------------------------------------


def _kubeconfig(server: str, more: str = "") -> str:
    cluster = f"{{server: '{server}'{', ' if more else ''}{more}}}"
    return (
        "apiVersion: v1\nkind: Config\ncurrent-context: a\n"
        f"clusters: [{{name: a, cluster: {cluster}}}]\n"
        "contexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "users: [{name: a, user: {token: abc}}]\n"
    )


BAD_PROXIES = [
    "http://[::",
    "http://x:99999999",
    "//",
    "socks5://x:1",
    "http://user:secret@@:x",
    "http://\udcff",
    "a\nb",
]


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy"])
@pytest.mark.parametrize("proxy", BAD_PROXIES)
def test_an_unusable_proxy_variable_is_named_without_its_password(
    proxy: str, variable: str, tmp_path: Path, config_file: str
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(_kubeconfig("https://127.0.0.1:1"))
    variables = {variable: proxy}
    done = nodeagent("check", "--api", "always", "--kubeconfig", str(kubeconfig), **variables)
    assert (done.returncode, done.stdout) == (3, "")
    assert "set HTTPS_PROXY to http://HOST:PORT, or unset it" in done.stderr
    assert "secret" not in done.stderr
    done = nodeagent("check", "--host-root", str(CALM), "--kubeconfig", str(kubeconfig), **variables)
    assert done.returncode == 0, "auto: the report is made from the host alone"
    done = nodeagent(
        "run", "--once", "--dry-run", "--config", config_file, "--kubeconfig", str(kubeconfig), **variables
    )
    assert done.returncode == 78
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", ["*", "[,,::/9,\udcff", "," * 1000, "127.0.0.1/99", " "])
def test_an_odd_no_proxy_is_ignored(value: str, tmp_path: Path) -> None:
    with ApiServer() as server:
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
        done = nodeagent("check", "--api", "always", "--kubeconfig", str(kubeconfig), NO_PROXY=value)
        assert done.returncode in (0, 1, 2, 3)
        assert done.stdout
        assert "Traceback" not in done.stderr
