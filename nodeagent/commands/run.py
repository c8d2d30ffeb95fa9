"""`nodeagent run`: the agent of this node, until SIGTERM or SIGINT.

Theory of operation. Only one agent acts on a node. Another one with `mode: enforce` runs as a dry run until the lock is
free; then the process replaces itself, so that no thread, descriptor or state of the dry run is left.
"""

import contextlib
import os
import signal
import sys
from typing import Final

from nodeagent.commands import exit_codes
from nodeagent.config import load
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.load import LoadedConfig
from nodeagent.config.schema import Config
from nodeagent.loop import assembly
from nodeagent.loop.assembly import CannotRunError, CannotRunKind
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, Unreadable, open_host
from nodeagent.telemetry import log as agent_log

ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
BESIDE_SINCE: Final = "_NODEAGENT_BESIDE_SINCE"
"""Environment variable of a process that replaces itself: since when (CLOCK_BOOTTIME) it ran beside another agent."""


def run(
    *, config_path: str | None, host_root: str, node_name: str | None, kubeconfig: str | None, dry_run: bool, once: bool
) -> int:
    """Run the agent until SIGTERM or SIGINT, or with `once` for one sync. Returns the exit code.

    Raises:
        ConfigError: the configuration is invalid.
        CannotRunError: the configuration is valid, but not on this machine.
        IdentityError: the given name is not a valid node name.
    """
    try:
        host = open_host(host_root)
    except Unreadable as error:
        raise CannotRunError(f"--host-root: {error}", CannotRunKind.USAGE) from error

    def load_config(mode: str | None) -> tuple[ConfigFile, LoadedConfig]:
        overrides = load.overrides_from(os.environ, mode=mode, node_name=node_name, kubeconfig=kubeconfig)
        file = ConfigFile(config_path, overrides=overrides)
        return file, file.load()

    file, loaded = load_config("dry-run" if dry_run else None)
    log, writer = agent_log.open_log(level=loaded.config.logging.level, style=loaded.config.logging.format)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        for problem in loaded.warnings:
            log.warning("configuration warning", problem=str(problem))
        lock = _agent_lock(loaded.config, host)
        stack.callback(lock.release)
        other = lock.take() if load.may_enforce(loaded) and not host.recorded else ""
        beside_since = float(os.environ.pop(BESIDE_SINCE, "-inf"))
        if other:
            file, loaded = load_config("dry-run")
            began = str(host.boottime())
        agent, wakeups = assembly.build_agent(
            loaded, file, host, log, writer, stack, lock=lock, other=other, beside_since=beside_since
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, assembly.SIGNALS)  # the process before this one blocked them
        try:
            restart = agent.run(wakeups, syncs=1 if once else None)
        finally:
            agent.stop(restarting=restart)
        if restart:
            # From here to the handlers of the next process a signal waits, except in a thread that has not ended: there
            # SIGTERM has its default effect, and SIGHUP none, because the next process reads the configuration anyway.
            signal.pthread_sigmask(signal.SIG_BLOCK, assembly.SIGNALS)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if restart and not ENDING & set(wakeups.signals()):
        if other:
            os.environ[BESIDE_SINCE] = began
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - its own command line
    return exit_codes.OK


def _agent_lock(config: Config, host: Host) -> AgentLock:
    def kubepods() -> str | None:
        hierarchy = cgroups.detect_hierarchy(host)
        found, _ = cgroups.find_kubepods(host, hierarchy, cgroup_root=config.sampling.cgroup_root)
        return host.real(f"{hierarchy.memory}{found.path}") if found is not None else None

    return AgentLock(state_dir=config.state_dir, kubepods=kubepods)
