"""An OCI image layout from a root directory, the same for the same content; docs/image.md says what that depends on.

Nothing of the machine is in it: owners are root, times are those of the files but never later than the given one, names
are sorted, and the compressed streams have neither name nor time.
"""

import datetime as dt
import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""OCI's names of machines."""
_IMAGE: Final = "application/vnd.oci.image"


class Command(NamedTuple):
    """What a container runs."""

    entrypoint: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: dict[str, str]


def write(
    layout: Path, root: Path, command: Command, *, apart: tuple[str, ...], reference: str, created: dt.datetime
) -> str:
    """Write the new directory `layout` and return the digest of the image's manifest.

    The first layer has everything but the directories `apart`, which are a layer each.
    """
    (layout / "blobs/sha256").mkdir(parents=True)
    layers = [_write_layer(layout, root, "", without=apart, latest=created)]
    layers += [_write_layer(layout, root, each, without=(), latest=created) for each in apart]
    stamp = created.strftime("%Y-%m-%dT%H:%M:%SZ")
    config = {
        "created": stamp,
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {
            "Env": [f"{name}={value}" for name, value in command.environment.items()],
            "Entrypoint": command.entrypoint,
            "Cmd": command.arguments,
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]},
        "history": [{"created": stamp, "created_by": f"COPY /{each}"} for each in ("", *apart)],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_IMAGE}.manifest.v1+json",
        "config": _write_blob(layout, "config.v1+json", _as_json(config)),
        "layers": [descriptor for descriptor, _ in layers],
    }
    described = _write_blob(layout, "manifest.v1+json", _as_json(manifest))
    named = described | {"annotations": {"org.opencontainers.image.ref.name": reference}}
    (layout / "index.json").write_bytes(_as_json({"schemaVersion": 2, "manifests": [named]}))
    (layout / "oci-layout").write_bytes(_as_json({"imageLayoutVersion": "1.0.0"}))
    return str(described["digest"])


def _write_layer(
    layout: Path, root: Path, start: str, *, without: tuple[str, ...], latest: dt.datetime
) -> tuple[dict[str, Any], str]:
    """The layer's descriptor and the digest of its content before compression."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in _below(root, root / start, tuple(root / each for each in without)):
            entry = tar.gettarinfo(path, arcname=path.relative_to(root).as_posix())
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = min(int(entry.mtime), int(latest.timestamp()))
            if entry.isreg():
                with path.open("rb") as content:
                    tar.addfile(entry, content)
            else:
                tar.addfile(entry)
    diff_id = f"sha256:{hashlib.sha256(packed.getbuffer()).hexdigest()}"
    return _write_blob(layout, "layer.v1.tar+gzip", gzip.compress(packed.getbuffer(), 6, mtime=0)), diff_id


def _below(root: Path, path: Path, without: tuple[Path, ...]) -> Iterator[Path]:
    """Every path, each directory before its content; of the image's root the content only."""
    if path in without:
        return
    if path != root:
        yield path
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            yield from _below(root, child, without)


def _write_blob(layout: Path, kind: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(content)
    return {"mediaType": f"{_IMAGE}.{kind}", "digest": f"sha256:{digest}", "size": len(content)}


def _as_json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
