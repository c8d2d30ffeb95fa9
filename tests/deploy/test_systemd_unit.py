"""systemd/nodeagent.service asks for what the code uses. That it runs is for tests/vm to show."""

import re
from pathlib import Path
from typing import Final

from nodeagent.actuators import reclaim_runner
from nodeagent.config import load
from nodeagent.config.schema import Mode, SamplingConfig
from nodeagent.sampling.node import kernel_log
from tests.support.paths import REPOSITORY

UNIT: Final = REPOSITORY / "systemd" / "nodeagent.service"
SLICE: Final = REPOSITORY / "systemd" / "nodeagent.slice"
BEFORE_253: Final = REPOSITORY / "systemd" / "drop-ins" / "before-253.conf"

CAPABILITIES: Final = {
    "CAP_DAC_READ_SEARCH": ("nodeagent/sampling/disk", r"scandir|openat|dir_fd|os\.open"),
    "CAP_SYS_RESOURCE": ("nodeagent/sampling/events/kernel_events.py", r"CAP_SYS_RESOURCE"),
}
"""Each capability that the unit keeps, and the code that uses it."""


def settings(path: Path) -> dict[str, list[str]]:
    """Every assignment of a unit file, in order, whatever its section."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^([A-Za-z]+)=(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def seconds(text: str) -> float:
    return float(re.fullmatch(r"([0-9.]+)s", text)[1])  # type: ignore[index]


def code() -> str:
    return "\n".join(module.read_text(encoding="utf-8") for module in (REPOSITORY / "nodeagent").rglob("*.py"))


def test_the_command_line_is_one_that_the_program_accepts() -> None:
    from nodeagent.commands.arguments import parser

    (command,) = settings(UNIT)["ExecStart"]
    program, *arguments = command.split()
    assert Path(program).name == "nodeagent"
    assert parser().parse_args(arguments).config == "/etc/nodeagent/config.yaml"


def test_the_credential_is_the_kubeconfig_that_the_agent_finds() -> None:
    (credential,) = settings(UNIT)["LoadCredential"]
    name, _, source = credential.partition(":")
    assert source == "/etc/nodeagent/kubeconfig"
    assert f"KUBECONFIG=%d/{name}" in settings(UNIT)["Environment"]


def test_the_state_directory_is_the_configured_one_and_outlives_a_restart() -> None:
    from nodeagent.config.schema import Config

    (directory,) = settings(UNIT)["RuntimeDirectory"]
    assert Config().state_dir == f"/run/{directory}"
    assert settings(UNIT)["RuntimeDirectoryPreserve"] == ["yes"]


def test_the_watchdog_leaves_the_loop_time_for_a_slow_sync() -> None:
    from nodeagent.config.schema import Config

    (limit,) = settings(UNIT)["WatchdogSec"]
    assert seconds(limit) >= 3 * Config().sampling.interval_s + Config().cluster.request_timeout_s


def test_a_reload_is_waited_for_where_systemd_can_and_a_plain_signal_where_it_cannot() -> None:
    """systemd before 253 ignores a type that it does not know, and keeps the one before. Where there is an ExecReload,
    later ones do not wait for the agent once that command has ended."""
    assert settings(UNIT)["Type"] == ["notify", "notify-reload"]
    assert "ExecReload" not in settings(UNIT)
    assert settings(BEFORE_253) == {"ExecReload": ["/bin/kill -HUP $MAINPID"]}
    assert "signal.SIGHUP" in code(), "it ends a process that does not handle it"


def test_every_capability_is_used_by_the_code_that_is_named_for_it() -> None:
    (kept,) = settings(UNIT)["CapabilityBoundingSet"]
    assert set(kept.split()) == CAPABILITIES.keys()
    for place, fragment in CAPABILITIES.values():
        path = REPOSITORY / place
        modules = [path] if path.is_file() else sorted(path.rglob("*.py"))
        assert any(re.search(fragment, module.read_text(encoding="utf-8")) for module in modules), place


def test_logs_can_be_removed_where_the_drop_in_allows_it() -> None:
    (paths,) = settings(UNIT.parent / "drop-ins" / "reclaim.conf")["ReadWritePaths"]
    allowed = {path.removeprefix("-") for path in paths.split()}
    assert allowed == {SamplingConfig().pod_logs_dir, *reclaim_runner.JOURNAL_DIRECTORIES}
    assert "drop-ins/reclaim.conf" in reclaim_runner.WRITABLE


def test_fork_rates_have_the_right_that_older_kernels_ask_for() -> None:
    assert settings(UNIT.parent / "drop-ins" / "fork-rates.conf") == {"CapabilityBoundingSet": ["CAP_NET_ADMIN"]}
    connector = (REPOSITORY / "nodeagent" / "sampling" / "events" / "process_connector.py").read_text(encoding="utf-8")
    assert "needs CAP_NET_ADMIN" in connector


def test_oom_scores_have_the_right_to_write_other_users_files() -> None:
    assert settings(UNIT.parent / "drop-ins" / "oom-scores.conf") == {"CapabilityBoundingSet": ["CAP_DAC_OVERRIDE"]}
    scores = (REPOSITORY / "nodeagent" / "actuators" / "oom_scores.py").read_text(encoding="utf-8")
    assert "CAP_DAC_OVERRIDE is missing" in scores


def test_the_kernel_log_has_the_rights_that_its_device_asks_for() -> None:
    assert settings(UNIT.parent / "drop-ins" / "kernel-log.conf") == {
        "ProtectKernelLogs": ["no"],
        "PrivateDevices": ["no"],
        "DeviceAllow": [f"{kernel_log.KMSG} r"],
        "CapabilityBoundingSet": ["CAP_SYSLOG"],
    }
    assert settings(UNIT)["ProtectKernelLogs"] == ["yes"]


def test_a_dry_run_without_root_has_the_user_of_sysusers_no_capability_and_sends_nothing() -> None:
    dropped = settings(UNIT.parent / "drop-ins" / "non-root.conf")
    [user] = re.findall(r"^u (\S+) ", (UNIT.parent / "sysusers.conf").read_text("utf-8"), re.MULTILINE)
    assert dropped == {"User": [user], "Environment": ["NODEAGENT_MODE=dry-run"], "CapabilityBoundingSet": [""]}
    enforcing = str(UNIT.parent / "config.yaml")
    assert load.load(enforcing).config.mode is Mode.ENFORCE
    overrides = load.overrides_from(dict([dropped["Environment"][0].split("=")]))
    assert load.load(enforcing, overrides=overrides).config.mode is Mode.DRY_RUN


def test_the_kubeconfig_is_for_root_and_no_directory_of_the_agent_has_an_age() -> None:
    """systemd-tmpfiles locks a directory whose old files it removes, and the agent locks its own (flock(2))."""
    lines = (UNIT.parent / "tmpfiles.conf").read_text("utf-8").splitlines()
    [credential] = settings(UNIT)["LoadCredential"]
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert rows == [["z", credential.partition(":")[2], "0600", "root", "root", "-", "-"]]


def test_the_slice_protects_what_the_unit_requests() -> None:
    """memory.min has no effect below a cgroup that does not guard as much."""
    assert settings(UNIT)["Slice"] == [SLICE.name]
    assert settings(UNIT)["MemoryMin"] == settings(SLICE)["MemoryMin"]


def test_the_oom_killer_comes_as_late_as_the_agent_itself_asks() -> None:
    from nodeagent.runtime import self_protection

    assert settings(UNIT)["OOMScoreAdjust"] == [str(self_protection.OOM_SCORE_ADJ)]
    assert settings(UNIT)["Nice"] == [str(self_protection.NICE)]
