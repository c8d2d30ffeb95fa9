"""A Debian virtual machine for a test: boot it, run commands in it, copy files in, stop it.

Promises:

1. Every wait has a deadline, and what the machine printed on its console is in the error.
2. The image is never written: each machine works on a snapshot that vanishes with it.
3. `stop` ends the emulator, whatever state it is in. So does the end of the process that started it, also by a signal.
4. A kernel that dies while it boots is booted again, at most `BOOTS` times in all, and reported. That is the emulator:
   on two CPUs it now and then runs code that the kernel has just patched as it was before (`Oops: int3`;
   bugzilla.redhat.com/2216496). Whatever dies after the boot fails its test.

Emulated (TCG) unless NODEAGENT_VM_ACCEL is `kvm`: python runs about ten times slower in there than on the host,
memory is first touched about as fast.
"""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.vm.image import Image

HOST_LOOPBACK: Final = "10.0.2.2"
"""The host's 127.0.0.1, seen from the guest."""
BOOT_TIMEOUT_S: Final = 400.0
"""A boot took 13 s on an idle host with two cores; the rest is for a busy one."""
BOOTS: Final = 3
COMMAND_TIMEOUT_S: Final = 180.0
ANSWER_TIMEOUT_S: Final = 60.0
LOGGED_WITHIN_S: Final = 180.0
_KERNEL_ARGUMENTS: Final = (
    "root=/dev/vda rw console=ttyS0 quiet psi=1 systemd.unified_cgroup_hierarchy=1 net.ifnames=0 mitigations=off "
    "clearcpuid=112 panic=-1 norandmaps"
)
"""Without random addresses the emulator finds a program's code again that it has translated for an earlier process: a
process starts with half the CPU time."""
_CPU: Final = (
    "max,erms=off,fsrm=off,cx16=off,xsave=off,smap=off,smep=off,la57=off,aes=off,avx=off,pclmulqdq=off,svm=off"
)
"""Without `rep stos` (112 is the kernel's REP_GOOD), which emulation does byte by byte: first touch of memory then
reaches 2 GiB/s instead of 0.4. Without `cmpxchg16b`: QEMU 7.2 spoils the flags in it, and Linux 6.12 dies of that.
Without wide registers, protections of the kernel against itself and a fifth level of page tables: 6% of the time.
Without AES in hardware, whose test in Linux 6.12 needs those registers and ends in an Oops, and virtual machines of its
own: drivers that need not start."""
_POWER: Final = 64
"""PMBASE and ACPI_CNTL in the configuration of q35's LPC bridge."""
_PANIC: Final = "Kernel panic"
_READY: Final = "vm-ready"
"""Printed on the console by guest/etc/systemd/system/vm-ready.service."""


class CommandFailedError(AssertionError):
    """A command in the machine ended with another status than 0."""


class KernelDiedError(AssertionError):
    """The machine's kernel panicked before it was up."""


@contextlib.contextmanager
def booted(image: Image, directory: Path, *, cpus: int = 2) -> Iterator["Machine"]:
    """A machine that has just booted, and is stopped in the end. Its files are in `directory`."""
    with contextlib.ExitStack() as running:
        for left in reversed(range(BOOTS)):
            machine = Machine(image, cpus=cpus, directory=directory / f"boot-{BOOTS - left}")
            running.callback(machine.stop)
            try:
                machine.wait_until_ready()
            except KernelDiedError as error:
                if not left:
                    raise
                print(f"booted once more: {error}", file=sys.stderr)
            else:
                break
        yield machine


class Machine:
    """One running machine."""

    def __init__(
        self, image: Image, *, memory_mib: int = 2048, cpus: int = 2, imagefs_mib: int = 512, directory: Path
    ) -> None:
        """Starts the machine; `wait_until_ready` waits for its boot. `directory` takes its console and second disk."""
        self.touched = False
        """Nearly all of its memory was used once. The emulator takes it from the host at the first touch, which halves
        the speed."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        # A socket's path may have 107 bytes, which pytest's directories come close to.
        self._sockets = tempfile.TemporaryDirectory(prefix="nodeagent-vm-")
        self._port = _free_port()
        self._ready = threading.Event()
        self._console_path = directory / "console.log"
        (directory / "known_hosts").write_text(f"vm {image.host_key}\n", encoding="ascii")
        self._key = image.key
        imagefs = directory / "imagefs.img"
        subprocess.run(
            ["mke2fs", "-q", "-t", "ext4", "-L", "imagefs", str(imagefs), f"{imagefs_mib}M"],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
        )
        self._qemu = subprocess.Popen(
            _qemu_command(image, memory_mib=memory_mib, cpus=cpus, imagefs=imagefs, ssh_port=self._port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read_console, daemon=True)
        self._reader.start()

    def wait_until_ready(self, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Returns when the machine takes commands.

        KernelDiedError if its kernel panicked, TimeoutError if it does not come up, each with the console's end.
        """
        self._ready.wait(timeout_s)
        console = self.console()
        if _READY not in console and _PANIC in console:
            msg = f"the machine's kernel died while it booted; its console ended with:\n{console[-4000:]}"
            raise KernelDiedError(msg)
        if _READY not in console:
            msg = f"the machine did not come up in {timeout_s:.0f} s; its console ended with:\n{console[-4000:]}"
            raise TimeoutError(msg)
        subprocess.run(
            [*self._ssh("-M", "-N", "-f"), "vm"], check=True, timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )

    def run(
        self,
        command: str | Sequence[str],
        *,
        check: bool = True,
        timeout_s: float = COMMAND_TIMEOUT_S,
        stdin: bytes | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a shell command (or, given a list, exactly these words) as root and returns what it printed.

        CommandFailedError if `check` and its status is not 0; subprocess.TimeoutExpired after `timeout_s`.
        """
        line = command if isinstance(command, str) else shlex.join(command)
        ran = subprocess.run(
            [*self._ssh(), "vm", line],
            input=stdin or b"",
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        done = subprocess.CompletedProcess(line, ran.returncode, ran.stdout.decode(), ran.stderr.decode())
        if check and done.returncode != 0:
            msg = f"{line}: status {done.returncode}\n{done.stdout}{done.stderr}{self._end()}"
            raise CommandFailedError(msg)
        return done

    def _end(self) -> str:
        """How the machine ended; empty while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._qemu.wait(timeout=1)
            return f"the emulator ended with {status}; the console ended with:\n{self.console()[-4000:]}"
        return ""

    def answers(self) -> bool:
        """Whether a command still runs in it, within a minute."""
        try:
            return self.run("true", check=False, timeout_s=ANSWER_TIMEOUT_S).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def start(self, command: str) -> subprocess.Popen[str]:
        """Starts a shell command that is talked to through its stdin and stdout, both line-buffered text."""
        return subprocess.Popen(
            [*self._ssh(), "vm", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def write(self, path: str, content: str | bytes, *, mode: int = 0o644) -> None:
        """Writes a file in the machine, with the directories above it."""
        data = content.encode() if isinstance(content, str) else content
        quoted = shlex.quote(path)
        self.run(f"mkdir -p $(dirname {quoted}) && cat >{quoted} && chmod {mode:o} {quoted}", stdin=data)

    def copy(self, source: Path, target: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Copies a file or a directory of the host into the machine's directory `target`.

        Not through SSH, which an emulated processor decrypts at 8 MB a second.
        """
        quoted = shlex.quote(target)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(timeout_s)
            sender = threading.Thread(target=_send, args=(server, source), daemon=True)
            sender.start()
            stream = f"/dev/tcp/{HOST_LOOPBACK}/{server.getsockname()[1]}"
            unpack = f"mkdir -p {quoted} && tar -C {quoted} -xf - --no-same-owner <{stream}"
            self.run(["bash", "-c", unpack], timeout_s=timeout_s)
            sender.join()

    def sleep(self, seconds: int) -> None:
        """Suspends the machine to memory (ACPI S3) for so long; its clock wakes it. (`freeze` nothing here ends.)

        The emulator's firmware forgets where the power management registers are, without which the machine does not
        sleep a second time: what it had set in the kernel is restored.
        """
        bridge = "/sys/bus/pci/devices/0000:00:1f.0/config"
        self.run(
            f"dd status=none bs=1 count=8 skip={_POWER} if={bridge} of=/run/power && rtcwake -m mem -s {seconds}; "
            f"dd status=none bs=1 count=8 seek={_POWER} if=/run/power of={bridge} conv=notrunc",
            timeout_s=seconds + COMMAND_TIMEOUT_S,
        )

    def console(self) -> str:
        """What the machine has printed so far, kernel messages included."""
        return self._console_path.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Ends the machine at once. May be called twice."""
        self._qemu.kill()
        self._qemu.wait()
        self._reader.join()
        self._sockets.cleanup()

    def _read_console(self) -> None:
        assert self._qemu.stdout is not None
        with self._qemu.stdout as console, self._console_path.open("wb", buffering=0) as log:
            for line in console:
                log.write(line)
                if _READY.encode() in line:
                    self._ready.set()
        self._ready.set()  # QEMU ended: a waiting caller should check now

    def _ssh(self, *more: str) -> list[str]:
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": "60",
            "ControlPath": f"{self._sockets.name}/ssh",
            "HostKeyAlias": "vm",
            "HostName": "127.0.0.1",
            "IdentitiesOnly": "yes",
            "IdentityFile": str(self._key),
            "LogLevel": "ERROR",
            "Port": str(self._port),
            "StrictHostKeyChecking": "yes",
            "User": "root",
            "UserKnownHostsFile": str(self._directory / "known_hosts"),
        }
        return ["ssh", "-F", os.devnull, *more, *(f"-o{name}={value}" for name, value in options.items())]


def wait_for_text(read: Callable[[], str], text: str) -> str:
    """What `read` returns, once it contains the text: a log in the machine."""
    deadline = time.monotonic() + LOGGED_WITHIN_S
    while text not in (found := read()):
        assert time.monotonic() < deadline, f"never logged: {text}\n{found}"
        time.sleep(0.5)
    return found


def _qemu_command(image: Image, *, memory_mib: int, cpus: int, imagefs: Path, ssh_port: int) -> list[str]:
    accelerator = os.environ.get("NODEAGENT_VM_ACCEL", "tcg")
    if not re.fullmatch(r"tcg|kvm", accelerator):
        msg = f"NODEAGENT_VM_ACCEL is {accelerator!r}; it may be tcg or kvm"
        raise ValueError(msg)
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        "qemu-system-x86_64",
        "-nodefaults",
        "-no-user-config",
        *("-display", "none"),
        *("-machine", f"q35,accel={accelerator}"),
        *("-cpu", _CPU),
        *("-smp", str(cpus)),
        *("-m", str(memory_mib)),
        *("-kernel", str(image.kernel)),
        *("-initrd", str(image.initrd)),
        *("-append", _KERNEL_ARGUMENTS),
        *("-serial", "stdio"),
        *("-drive", f"file={image.root},format=raw,if=virtio,snapshot=on"),
        *("-drive", f"file={imagefs},format=raw,if=virtio"),
        *("-netdev", f"user,id=uplink,hostfwd=tcp:127.0.0.1:{ssh_port}-:22"),
        *("-device", "virtio-net-pci,netdev=uplink,romfile="),
        "-no-reboot",
    ]


def _send(server: socket.socket, source: Path) -> None:
    """Sends a file or a directory to the first client. One that gets less than all of it reports that."""
    with contextlib.suppress(OSError), server.accept()[0] as connection:
        subprocess.run(
            ["tar", "-C", str(source.parent), "-cf", "-", source.name], stdout=connection.fileno(), check=False
        )


def _free_port() -> int:
    """A free port of the loopback. Another process could take it before QEMU: then the boot fails and names it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
