"""What an image's root directory contains, as CycloneDX 1.6: `python -m tests.support.sbom ROOT > nodeagent.cdx.json`.

Components are the packages of Debian in var/lib/dpkg/status.d and the Python distributions of /opt/nodeagent, with the
SHA-256 of the archives that they were unpacked from, their licenses as they state them, and what needs what. The same
root gives the same text: the document has the time of SOURCE_DATE_EPOCH, if set, and a serial number by its content.
"""

import datetime as dt
import email.parser
import hashlib
import os
import re
import sys
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DEBIAN_PACKAGES: Final = "var/lib/dpkg/status.d"
AGENT: Final = "opt/nodeagent"
_PROJECT: Final = "nodeagent"
_LICENSE_FIELD: Final = re.compile(r"^License: *(\S.*)$", re.MULTILINE)
"""In a machine-readable copyright file."""
_CLASSIFIER: Final = "License :: OSI Approved :: "


class _Package(NamedTuple):
    component: Component
    needs: frozenset[str]
    """Names; those that are not in the image are left out later."""


def make_bom(root: Path, *, created: dt.datetime) -> str:
    """The document's text. Raises FileNotFoundError for a root directory that is not the image's."""
    debian = dict(_debian_packages(root))
    python = dict(_python_distributions(root / AGENT))
    bom = Bom()
    project = python.pop(_PROJECT)
    bom.metadata.component = project.component
    bom.metadata.component.type = ComponentType.CONTAINER
    bom.metadata.timestamp = created
    interpreter = next(name for name in debian if re.fullmatch(r"python3\.\d+-minimal", name))
    for packages in (debian, python):
        for package in packages.values():
            bom.components.add(package.component)
            bom.register_dependency(
                package.component, [packages[name].component for name in sorted(package.needs & packages.keys())]
            )
    bom.register_dependency(
        project.component,
        [*(python[name].component for name in sorted(project.needs & python.keys())), debian[interpreter].component],
    )
    content = "\n".join(
        sorted(f"{each.purl} {[str(found.content) for found in each.hashes]}" for each in bom.components)
    )
    bom.serial_number = uuid.UUID(bytes=hashlib.sha256(content.encode()).digest()[:16], version=4)
    return str(JsonV1Dot6(bom).output_as_string(indent=2)) + "\n"


def _debian_packages(root: Path) -> Iterator[tuple[str, _Package]]:
    release = dict(
        line.split("=", 1) for line in (root / "usr/lib/os-release").read_text("utf-8").splitlines() if "=" in line
    )
    distribution = f"debian-{release['VERSION_ID'].strip(chr(34))}"
    for file in sorted((root / DEBIAN_PACKAGES).iterdir()):
        if file.suffix == ".md5sums":
            continue
        fields = email.parser.Parser().parsestr(file.read_text("utf-8"))
        name = fields["Package"]
        qualifiers = {"arch": fields["Architecture"], "distro": distribution}
        if fields["Source"]:
            qualifiers["upstream"] = fields["Source"].partition(" ")[0]
        purl = PackageURL("deb", "debian", name, fields["Version"], qualifiers)
        component = Component(
            name=name,
            version=fields["Version"],
            description=fields["Description"].splitlines()[0],
            purl=purl,
            bom_ref=str(purl),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=fields["SHA256"])],
            licenses=_debian_licenses(root, name),
        )
        alternatives = re.split(r"[,|]", ",".join((fields["Depends"] or "", fields["Pre-Depends"] or "")))
        needs = frozenset(re.split(r"[ (:]", each.strip())[0] for each in alternatives)
        yield name, _Package(component, needs)


def _debian_licenses(root: Path, name: str) -> list[DisjunctiveLicense]:
    """The short names in a machine-readable copyright file; none of another one, which is prose."""
    text = (root / "usr/share/doc" / name / "copyright").read_text("utf-8", errors="replace")
    if not text.startswith("Format:"):
        return []
    return [DisjunctiveLicense(name=found) for found in sorted(set(_LICENSE_FIELD.findall(text)))]


def _python_distributions(environment: Path) -> Iterator[tuple[str, _Package]]:
    (site,) = environment.glob("lib/python*/site-packages")
    wheels = dict(line.split() for line in (environment / "wheels.txt").read_text("ascii").splitlines())
    digests = {canonicalize_name(name): digest for name, digest in wheels.items()}
    for each in sorted(metadata.distributions(path=[str(site)]), key=lambda each: each.name):
        name = canonicalize_name(each.name)
        purl = PackageURL("pypi", None, name, each.version)
        component = Component(
            name=each.name,
            version=each.version,
            description=each.metadata["Summary"],
            purl=purl,
            bom_ref=str(purl),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digests[name])] if name != _PROJECT else [],
        )
        license_text = _python_license(each)
        if license_text:
            component.licenses.add(LicenseFactory().make_from_string(license_text))
        needs = [Requirement(line) for line in each.requires or ()]
        required = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        yield name, _Package(component, frozenset(canonicalize_name(need.name) for need in required))


def _python_license(distribution: metadata.Distribution) -> str:
    stated = [distribution.metadata.get_all(field) or [""] for field in ("License-Expression", "License")]
    found = stated[0][0] or stated[1][0]
    classifiers = distribution.metadata.get_all("Classifier") or []
    names = [each.removeprefix(_CLASSIFIER) for each in classifiers if each.startswith(_CLASSIFIER)]
    return found or " AND ".join(names)


def creation_time() -> dt.datetime:
    """That of SOURCE_DATE_EPOCH, else now."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    return dt.datetime.fromtimestamp(int(epoch), dt.UTC) if epoch else dt.datetime.now(dt.UTC).replace(microsecond=0)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.stdout.write(make_bom(Path(sys.argv[1]), created=creation_time()))
