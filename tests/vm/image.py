"""Builds the disk images of the test machines from Debian's packages and the project's declared dependencies.

A machine is a small Debian node without Kubernetes: systemd, cgroup v2, PSI, sshd, and a virtual environment in
/opt/nodeagent that holds what pyproject.toml depends on, but not the project: a test brings that, so that the image
stays the same while the code changes. About half of the tests run on `OLDER`, whose kernel gives PSI triggers to no
process without CAP_SYS_RESOURCE and whose systemd knows no notify-reload; the others on `NEWER`, the unit on both.

Promises:

1. An image is named by the hash of what it is made from (suite, this file, guest/, the list of dependencies); it is
   built once, under a lock of its suite, and appears whole or not at all.
2. Everything comes through the ordinary Debian and PyPI clients of the host. The guest never needs a network.
3. Nothing is written outside the cache directory: $NODEAGENT_VM_CACHE, else nodeagent-vm in $XDG_CACHE_HOME or
   ~/.cache.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.paths import REPOSITORY


class Suite(NamedTuple):
    """A release of Debian."""

    name: str
    python: str
    """Its Python."""
    systemd: int
    cpus: int = 2
    """Of its machine in the tests."""


OLDER: Final = Suite("bookworm", "3.11", 252)
"""Linux 6.1."""
NEWER: Final = Suite("trixie", "3.13", 257, cpus=1)
"""Linux 6.12. On one CPU, as the smallest nodes are: there the agent has none for itself."""
PACKAGES: Final = (
    "busybox-static",
    "containerd",
    "dbus",
    "e2fsprogs",
    "earlyoom",
    "initramfs-tools",
    "iproute2",
    "kmod",
    "linux-image-cloud-amd64",
    "openssh-server",
    "procps",
    "python3",
    "python3-venv",
    "runc",
    "systemd",
    "systemd-oomd",
    "systemd-sysv",
    "udev",
    "xfsprogs",
)
ROOT_SIZE: Final = "3G"
"""Of the sparse root file system; 900 MB of it are used. What is left is nodefs for the tests to fill."""
TOOLS: Final = ("qemu-system-x86_64", "setpriv", "ssh", "ssh-keygen")
BUILD_TOOLS: Final = ("mmdebstrap", "mke2fs", "chroot")
KEYRINGS: Final = Path("/usr/share/keyrings")
"""The archive keys of each release are in a file of its name."""
KEPT: Final = 4
"""Images that stay in the cache, at 740 MB each: this version's of each suite and those of the one before, so that two
work trees on one machine do not rebuild each other's."""
STEP_TIMEOUT_S: Final = 900.0
"""Deadline of one build step. The longest, mmdebstrap, took 56 s with a near mirror."""

GUEST: Final = Path(__file__).parent / "guest"
"""Files laid over the guest's root."""
STARTED_BY_TESTS: Final = ("containerd.service", "earlyoom.service", "systemd-oomd.service")
"""Not at boot: only some tests and benchmarks want them."""
MASKED: Final = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
    "systemd-logind.service",
    "systemd-networkd-wait-online.service",
)
"""Would only cost time, or write to the console."""
GENERATOR: Final = "systemd-fstab-generator"
"""The only one with something to generate. The others take two fifths of the CPU time of `systemctl daemon-reload`."""


class Image(NamedTuple):
    """A machine ready to boot."""

    kernel: Path
    initrd: Path
    root: Path
    """Raw ext4 image; boot it with a snapshot, it is shared."""
    key: Path
    """Private key that root's account accepts."""
    host_key: str
    """The guest's public host key, as a known_hosts line has it (`ssh-ed25519 AAAA...`)."""


def why_not(suite: Suite = OLDER) -> str:
    """Why this machine cannot run the tests; empty when it can. Words a person can act on."""
    if platform.machine() != "x86_64":
        return f"the test machine is x86_64 and this host is {platform.machine()}"
    tools = TOOLS if _folder(suite).exists() else TOOLS + BUILD_TOOLS
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"missing: {', '.join(missing)} (Debian: qemu-system-x86 mmdebstrap e2fsprogs openssh-client util-linux)"
    if not _folder(suite).exists() and not (KEYRINGS / f"debian-archive-{suite.name}-stable.gpg").exists():
        return f"this host has no archive keys of Debian {suite.name} (Debian: debian-archive-keyring)"
    if not _folder(suite).exists() and os.geteuid() != 0:
        return "only root can build the image; afterwards any user can run it"
    return ""


def image(suite: Suite = OLDER) -> Image:
    """The image for this version of the recipe, built now if there is none yet (about two minutes)."""
    folder = _folder(suite)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{suite.name}.lock"):
            if not folder.exists():
                _build(folder, suite)
                _forget_old(folder.parent)
    return Image(
        kernel=folder / "vmlinuz",
        initrd=folder / "initrd.img",
        root=folder / "root.img",
        key=folder / "key",
        host_key=(folder / "host_key.pub").read_text(encoding="ascii").strip(),
    )


def dependencies() -> list[str]:
    """What the project needs to run, as pyproject.toml declares it."""
    with (REPOSITORY / "pyproject.toml").open("rb") as stream:
        declared: list[str] = tomllib.load(stream)["project"]["dependencies"]
    return declared


def cache_folder() -> Path:
    """Where what takes long to make is kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("NODEAGENT_VM_CACHE") or f"{cache}/nodeagent-vm")


def _folder(suite: Suite) -> Path:
    recipe = hashlib.sha256(suite.name.encode() + Path(__file__).read_bytes())
    recipe.update("\n".join(dependencies()).encode())
    for path in sorted(path for path in GUEST.rglob("*") if path.is_file()):
        recipe.update(f"\0{path.relative_to(GUEST)}\0".encode() + path.read_bytes())
    return cache_folder() / recipe.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _forget_old(cache: Path) -> None:
    images = sorted((path.parent for path in cache.glob("*/root.img")), key=lambda path: path.stat().st_mtime)
    for folder in images[:-KEPT]:
        shutil.rmtree(folder, ignore_errors=True)  # the build of another suite may forget it too


def _build(folder: Path, suite: Suite) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        root = scratch / "root"
        mirror = [os.environ["NODEAGENT_VM_MIRROR"]] if "NODEAGENT_VM_MIRROR" in os.environ else []
        # With its machine-id, which a machine without one would make anew at each boot.
        keep = "--skip=cleanup/reproducible"
        packages = f"--include={','.join(PACKAGES)}"
        _step("mmdebstrap", "--mode=root", "--variant=minbase", keep, packages, suite.name, str(root), *mirror)
        _configure(root, scratch)
        _step("chroot", str(root), "update-initramfs", "-u")
        _install_dependencies(root, suite)
        for name in ("vmlinuz", "initrd.img"):  # links into boot/
            shutil.copyfile(root / (root / name).readlink(), scratch / name)
        _step("mke2fs", "-q", "-t", "ext4", "-L", "root", "-d", str(root), str(scratch / "root.img"), ROOT_SIZE)
        shutil.rmtree(root)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _configure(root: Path, scratch: Path) -> None:
    shutil.copytree(GUEST, root, dirs_exist_ok=True)
    (root / "var/lib/containerd").mkdir(parents=True, exist_ok=True)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    host_key = root / "etc/ssh/ssh_host_ed25519_key"
    _step("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(host_key))
    _step("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(scratch / "key"))
    shutil.copyfile(f"{host_key}.pub", scratch / "host_key.pub")
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(scratch / "key.pub", root / "root/.ssh/authorized_keys")
    systemctl = ("chroot", str(root), "systemctl")
    _step(*systemctl, "enable", "ssh.service", "systemd-networkd.service", "vm-ready.service")
    _step(*systemctl, "disable", *STARTED_BY_TESTS)
    _step(*systemctl, "mask", *MASKED)
    masked = root / "etc/systemd/system-generators"
    masked.mkdir(exist_ok=True)
    for generator in (root / "usr/lib/systemd/system-generators").iterdir():
        if generator.name != GENERATOR:
            (masked / generator.name).symlink_to(os.devnull)


def _install_dependencies(root: Path, suite: Suite) -> None:
    _step("chroot", str(root), "python3", "-m", "venv", "/opt/nodeagent")
    if suite == OLDER:  # since Python 3.12 there is none; every start of Python would run its hook
        _step("chroot", str(root), "/opt/nodeagent/bin/pip", "uninstall", "--quiet", "--yes", "setuptools")
    _step(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        f"--target={root}/opt/nodeagent/lib/python{suite.python}/site-packages",
        f"--python-version={suite.python}",
        "--only-binary=:all:",
        *(f"--platform=manylinux_2_{minor}_x86_64" for minor in (12, 17, 24, 26, 27, 28, 34, 36)),
        "--platform=manylinux2010_x86_64",
        "--platform=manylinux2014_x86_64",
        *dependencies(),
    )
    # By its own Python: the service cannot write there, and compiling takes long in an emulated machine.
    _step("chroot", str(root), "/opt/nodeagent/bin/python", "-m", "compileall", "-q", "/opt/nodeagent/lib")


def _step(*command: str) -> None:
    """Runs one command of the build; its output is shown only if it fails."""
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    ran = subprocess.run(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )
    if ran.returncode != 0:
        msg = f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}"
        raise RuntimeError(msg)


if __name__ == "__main__":
    reason = why_not()
    if reason:
        sys.exit(f"no image: {reason}")
    with ThreadPoolExecutor() as at_once:
        for made in at_once.map(image, (OLDER, NEWER)):
            print(made.root.parent)
