"""An image's layout is the same for the same content, its contents are listed, and its signature is of that content.

A small root directory stands for the image; tests/vm/test_release_image.py does the first two with the real one.
"""

import base64
import datetime as dt
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.support import oci_layout, sbom, signing

CREATED: Final = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
TAG: Final = "0.1.0"
COMMAND: Final = oci_layout.Command(("/opt/nodeagent/bin/nodeagent",), ("run",), {"PATH": "/opt/nodeagent/bin"})
SITE: Final = "opt/nodeagent/lib/python3.11/site-packages"
FILES: Final = {
    "usr/lib/os-release": 'ID=debian\nVERSION_ID="12"\n',
    "usr/share/doc/zlib1g/copyright": "Format: https://www.debian.org/\n\nFiles: *\nLicense: Zlib\n",
    "usr/share/doc/python3.11-minimal/copyright": "This package was put together by hand.\nLicense: prose\n",
    "var/lib/dpkg/status.d/zlib1g": (
        f"Package: zlib1g\nSource: zlib (1.2)\nVersion: 1:1.2.13.dfsg-1\nArchitecture: amd64\n"
        f"Depends: libc6 (>= 2.14)\nDescription: compression\n long text\nSHA256: {'1' * 64}\n"
    ),
    "var/lib/dpkg/status.d/zlib1g.md5sums": "0 usr/lib/libz.so.1\n",
    "var/lib/dpkg/status.d/python3.11-minimal": (
        f"Package: python3.11-minimal\nVersion: 3.11.2-6\nArchitecture: amd64\nPre-Depends: libc6\n"
        f"Depends: zlib1g (>= 1:1.2), libother | libmore\nDescription: Python\nSHA256: {'2' * 64}\n"
    ),
    f"{SITE}/nodeagent-0.1.0.dist-info/METADATA": (
        "Metadata-Version: 2.4\nName: nodeagent\nVersion: 0.1.0\nSummary: An agent\nLicense-Expression: Apache-2.0\n"
        "Requires-Dist: PyYAML>=6\nRequires-Dist: gone; extra == 'more'\n"
    ),
    f"{SITE}/PyYAML-6.0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: PyYAML\nVersion: 6.0.3\nLicense: MIT\n",
    "opt/nodeagent/wheels.txt": f"PyYAML {'3' * 64}\nunused {'4' * 64}\n",
}


def make_root(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "bin").symlink_to("usr/bin")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "opt/nodeagent/run").write_text("#!\n")
    (root / "opt/nodeagent/run").chmod(0o755)
    return root


def write_layout(layout: Path, root: Path) -> str:
    return oci_layout.write(layout, root, COMMAND, apart=("opt/nodeagent",), reference=TAG, created=CREATED)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "root")


def test_a_layout_has_nothing_of_when_and_in_which_order_its_files_were_made(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in sorted((path.relative_to(root) for path in root.rglob("*")), reverse=True):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_dir() and not (root / name).is_symlink():
            (other / name).mkdir(exist_ok=True)
            (other / name).chmod((root / name).stat().st_mode)
        else:
            shutil.copy2(root / name, other / name, follow_symlinks=False)
            os.utime(other / name, (2e9, 2e9), follow_symlinks=False)
    first, second = write_layout(tmp_path / "1", root), write_layout(tmp_path / "2", other)
    assert first == second
    files = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*") if path.is_file())
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


@pytest.mark.parametrize("change", ["content", "mode", "link", "name"])
def test_any_change_of_the_content_changes_the_digest(root: Path, tmp_path: Path, change: str) -> None:
    before = write_layout(tmp_path / "1", root)
    run = root / "opt/nodeagent/run"
    if change == "content":
        run.write_text("#?\n")
    elif change == "mode":
        run.chmod(0o4755)
    elif change == "link":
        (root / "bin").unlink()
        (root / "bin").symlink_to("/bin")
    else:
        run.rename(root / "opt/nodeagent/ran")
    assert write_layout(tmp_path / "2", root) != before


def test_other_programs_read_the_layout_and_unpack_what_was_packed(root: Path, tmp_path: Path) -> None:
    digest = write_layout(tmp_path / "oci", root)
    seen = json.loads(signing.run("skopeo", "inspect", f"oci:{tmp_path}/oci:{TAG}", home=tmp_path).stdout)
    assert (seen["Digest"], seen["Os"], len(seen["Layers"])) == (digest, "linux", 2)
    config = json.loads(signing.run("skopeo", "inspect", "--config", f"oci:{tmp_path}/oci:{TAG}", home=tmp_path).stdout)
    assert config["config"]["Entrypoint"] == list(COMMAND.entrypoint)
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    signing.run(
        "umoci", "unpack", *rootless, "--image", f"{tmp_path}/oci:{TAG}", str(tmp_path / "bundle"), home=tmp_path
    )
    assert listed(tmp_path / "bundle/rootfs") == listed(root)


def listed(root: Path) -> dict[str, tuple[int, str]]:
    """Mode and content or target of each path."""
    found = {}
    for path in root.rglob("*"):
        is_link, is_file = path.is_symlink(), path.is_file()
        content = str(path.readlink()) if is_link else path.read_text() if is_file else ""
        found[path.relative_to(root).as_posix()] = (path.lstat().st_mode, content)
    return found


def test_the_contents_are_listed_with_licenses_hashes_and_needs(root: Path) -> None:
    text = sbom.make_bom(root, created=CREATED)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert text == sbom.make_bom(root, created=CREATED)
    bom = json.loads(text)
    assert bom["metadata"]["component"]["purl"] == "pkg:pypi/nodeagent@0.1.0"
    assert bom["metadata"]["timestamp"] == "2026-11-20T00:00:00+00:00"
    parts = {each["name"]: each for each in bom["components"]}
    assert parts.keys() == {"zlib1g", "python3.11-minimal", "PyYAML"}
    zlib = "pkg:deb/debian/zlib1g@1:1.2.13.dfsg-1?arch=amd64&distro=debian-12&upstream=zlib"
    assert parts["zlib1g"]["purl"].replace("%3A", ":") == zlib
    assert parts["zlib1g"]["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    assert parts["zlib1g"]["licenses"] == [{"license": {"name": "Zlib"}}]
    assert "licenses" not in parts["python3.11-minimal"]
    assert parts["PyYAML"]["hashes"] == [{"alg": "SHA-256", "content": "3" * 64}]
    assert parts["PyYAML"]["licenses"] == [{"license": {"id": "MIT"}}]
    needs = {each["ref"].partition("@")[0]: each.get("dependsOn", []) for each in bom["dependencies"]}
    assert [each.partition("@")[0] for each in needs["pkg:deb/debian/python3.11-minimal"]] == ["pkg:deb/debian/zlib1g"]
    assert {each.partition("@")[0] for each in needs["pkg:pypi/nodeagent"]} == {
        "pkg:pypi/pyyaml",
        "pkg:deb/debian/python3.11-minimal",
    }


# --- signatures ------------------------------------------------------------------------------------------------------

UNLOGGED: Final = ("--insecure-ignore-tlog=true",)
"""No transparency log: that is a service in the network."""


class Signed:
    """A signed image in a registry."""

    def __init__(self, home: Path, address: str) -> None:
        self.home = home
        self.name = f"{address}/nodeagent"
        self.root = make_root(home / "root")
        self.digest = self.push("oci")
        self.image = f"{self.name}@{self.digest}"
        self.bom = home / "nodeagent.cdx.json"
        self.bom.write_text(sbom.make_bom(self.root, created=CREATED))
        for prefix in ("cosign", "other"):
            signing.run("cosign", "generate-key-pair", "--output-key-prefix", prefix, home=home)
        key = ("--yes", "--key", "cosign.key", "--tlog-upload=false")
        signing.run("cosign", "sign", *key, self.image, home=home)
        predicate = ("--type", "cyclonedx", "--predicate", str(self.bom))
        signing.run("cosign", "attest", *key, *predicate, self.image, home=home)

    def push(self, layout: str) -> str:
        """Write a layout of the root directory and push it with the tag."""
        digest = write_layout(self.home / layout, self.root)
        source, target = f"oci:{self.home / layout}:{TAG}", f"docker://{self.name}:{TAG}"
        copy = ("--insecure-policy", "copy", "--preserve-digests", "--dest-tls-verify=false")
        signing.run("skopeo", *copy, source, target, home=self.home)
        return digest

    def verifies(self, *arguments: str, key: str = "cosign.pub") -> bool:
        ran = signing.run("cosign", "verify", "--key", key, *UNLOGGED, *arguments, home=self.home, check=False)
        return ran.returncode == 0


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signed]:
    for name in ("cosign", "skopeo"):
        signing.program(name)
    home = tmp_path_factory.mktemp("signed")
    with signing.registry(home) as address:
        yield Signed(home, address)


def test_the_signature_is_of_the_digest_and_of_one_key(signed: Signed) -> None:
    assert signed.verifies(signed.image)
    assert not signed.verifies(signed.image, key="other.pub")


def test_another_image_with_the_same_tag_is_not_signed(signed: Signed) -> None:
    assert signed.verifies(f"{signed.name}:{TAG}")
    run = signed.root / "opt/nodeagent/run"
    run.write_text("#! changed\n")
    try:
        assert signed.push("changed") != signed.digest
        assert not signed.verifies(f"{signed.name}:{TAG}")
        assert signed.verifies(signed.image)
    finally:
        run.write_text("#!\n")


def test_the_signed_list_of_contents_is_the_one_that_was_made(signed: Signed) -> None:
    verify = ("cosign", "verify-attestation", "--type", "cyclonedx", *UNLOGGED)
    ran = signing.run(*verify, "--key", "cosign.pub", signed.image, home=signed.home)
    statement = json.loads(base64.b64decode(json.loads(ran.stdout)["payload"]))
    assert statement["subject"][0]["digest"]["sha256"] == signed.digest.removeprefix("sha256:")
    assert statement["predicate"] == json.loads(signed.bom.read_text())
    refused = signing.run(*verify, "--key", "other.pub", signed.image, home=signed.home, check=False)
    assert refused.returncode != 0


def test_a_local_layout_is_verified_and_a_changed_one_refused(signed: Signed) -> None:
    saved = signed.home / "saved"
    signing.run("cosign", "save", "--dir", str(saved), signed.image, home=signed.home)
    assert signed.verifies("--local-image", str(saved))
    index = json.loads((saved / "index.json").read_text())
    image = next(each for each in index["manifests"] if each["annotations"]["kind"].endswith("/image"))
    manifest = read_blob(saved, image["digest"])
    config = read_blob(saved, manifest["config"]["digest"])
    config["config"]["Entrypoint"] = ["/bin/other"]
    manifest["config"] |= write_blob(saved, config)
    image |= write_blob(saved, manifest)
    (saved / "index.json").write_text(json.dumps(index))
    assert not signed.verifies("--local-image", str(saved))


def test_a_layer_that_is_not_what_the_manifest_names_is_refused(signed: Signed, tmp_path: Path) -> None:
    """A signature is of the manifest; the manifest has the digests of the layers, which every client compares."""
    layout = tmp_path / "oci"
    shutil.copytree(signed.home / "oci", layout)
    manifest = read_blob(layout, signed.digest)
    layer = layout / "blobs/sha256" / manifest["layers"][0]["digest"].removeprefix("sha256:")
    layer.write_bytes(layer.read_bytes()[:-1] + b"\xff")
    copy = ("--insecure-policy", "copy", f"oci:{layout}:{TAG}", f"dir:{tmp_path}/copy")
    refused = signing.run("skopeo", *copy, home=tmp_path, check=False)
    assert refused.returncode != 0
    assert "digest" in refused.stderr.lower()


def read_blob(layout: Path, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_text())
    return found


def write_blob(layout: Path, document: dict[str, Any]) -> dict[str, Any]:
    content = json.dumps(document).encode()
    digest = hashlib.sha256(content).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}
