"""The project in a machine, as docs/bare-metal.md installs it, with the directories of a kubelet and a runtime."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.support.paths import REPOSITORY
from tests.vm.machine import Machine

ENVIRONMENT: Final = "/opt/nodeagent"


def build_wheel(directory: Path) -> Path:
    """The project, as it is published."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    built = subprocess.run(
        [*pip, f"--wheel-dir={directory}", str(REPOSITORY)], capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


def install(machine: Machine, wheel: Path) -> None:
    """What pip makes of the wheel. It runs on the host, which takes a twentieth of the time, and compiles there if that
    has the machine's Python."""
    python = machine.run(f"ls {ENVIRONMENT}/lib").stdout.strip()
    site = f"{ENVIRONMENT}/lib/{python}/site-packages"
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, f"--target={scratch}", str(wheel)], check=True, timeout=300)
        script = Path(scratch, "bin", "nodeagent")
        script.write_text(f"#!{ENVIRONMENT}/bin/python\n" + script.read_text("utf-8").partition("\n")[2], "utf-8")
        if python == f"python{sys.version_info.major}.{sys.version_info.minor}":
            strip = [f"-s{scratch}", f"-p{site}"]
            subprocess.run([sys.executable, "-m", "compileall", "-q", *strip, f"{scratch}/nodeagent"], check=True)
        machine.copy(script, f"{ENVIRONMENT}/bin")
        for part in Path(scratch).glob("nodeagent*"):
            machine.copy(part, site)
    machine.run(f"{ENVIRONMENT}/bin/python -m compileall -q {site}/nodeagent")
    machine.copy(REPOSITORY / "systemd", "/run/vm")
    machine.run("mkdir -p /var/lib/kubelet /var/log/pods")
