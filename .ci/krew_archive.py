"""Writes the archive of the kubectl plugin that a release publishes, and its hash into the manifest of krew.

    python .ci/krew_archive.py [ARCHIVE]

The archive depends on its files alone, so that anyone can make it again and compare the hash.
"""

import hashlib
import io
import re
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PLUGIN = REPOSITORY / "kubectl-plugin"
MANIFEST = PLUGIN / "nodeagent.yaml"
FILES = (PLUGIN / "kubectl-nodeagent", PLUGIN / "kubectl_complete-nodeagent", REPOSITORY / "LICENSE")


def archive() -> bytes:
    """The zip file: stored, without times."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for path in FILES:
            info = zipfile.ZipInfo(path.name)
            info.create_system = 3  # Unix, so that the permissions count
            info.external_attr = (0o100644 if path.name == "LICENSE" else 0o100755) << 16
            target.writestr(info, path.read_bytes())
    return buffer.getvalue()


def with_hash(manifest: str, data: bytes) -> str:
    """The manifest with the hash of this archive."""
    return re.sub(r"(?m)^( *sha256: ).*$", rf"\g<1>{hashlib.sha256(data).hexdigest()}", manifest)


if __name__ == "__main__":
    content = archive()
    MANIFEST.write_text(with_hash(MANIFEST.read_text("utf-8"), content), "utf-8")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_bytes(content)
