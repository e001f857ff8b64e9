#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the software bill of materials of ctkvr's Debian package or image: CycloneDX 1.6, as JSON, to stdout.

    deploy/sbom.py package ctkvr_0.1.0_amd64.deb    on the Debian machine where it was built
    deploy/sbom.py image STATUS                     STATUS: the image's own /var/lib/dpkg/status

A package's bill names what it needs when it is installed, and the libraries that are compiled into its programs; an
image's names all that is installed in it. Each component has its version, its purl and what it depends on. The same
input gives the same bytes when SOURCE_DATE_EPOCH is set. Needs the libraries of requirements.txt beside tests/deploy.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import uuid
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# Known to all scanners, kept by the OWASP foundation.
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6

# Debian's own parser of its own files.
from debian.deb822 import Packages, PkgRelation
from debian.debfile import DebFile
from packageurl import PackageURL

STATUS = Path("/var/lib/dpkg/status")
DISTRO = "debian-12"
# Headers alone, so nothing that is installed beside the programs tells of them.
COMPILED_IN = ("libcli11-dev", "libfp16-dev", "libsimde-dev", "libtomlplusplus-dev", "nlohmann-json3-dev")

Paragraph = Any  # a package as dpkg describes it: field -> text


def installed(status: Path) -> dict[str, Paragraph]:
    """The installed packages of a dpkg status file, by name."""
    with status.open("rb") as file:
        paragraphs = Packages.iter_paragraphs(file, use_apt_pkg=False)
        return {found["Package"]: found for found in paragraphs if found.get("Status") == "install ok installed"}


def relations(paragraph: Paragraph, field: str) -> list[list[str]]:
    """The names in a field of dependencies: for each, its alternatives."""
    text = paragraph.get(field, "")
    return [[one["name"] for one in alternatives] for alternatives in PkgRelation.parse_relations(text)] if text else []


def needs(paragraph: Paragraph, known: dict[str, Paragraph]) -> set[str]:
    """Names of the packages of `known` that fulfil its dependencies. Fails when one is not fulfilled."""
    fulfilled = {name: name for name in known}
    for name, other in known.items():
        for (virtual,) in relations(other, "Provides"):
            fulfilled.setdefault(virtual, name)
    names = set()
    for field in ("Pre-Depends", "Depends"):
        for alternatives in relations(paragraph, field):
            chosen = next((fulfilled[name] for name in alternatives if name in fulfilled), None)
            if chosen is None:
                raise LookupError(f"{paragraph['Package']} needs {' or '.join(alternatives)}, which is not installed")
            names.add(chosen)
    return names


def closure(paragraph: Paragraph, known: dict[str, Paragraph]) -> set[str]:
    """Names of all that it needs, and what those need, and so on."""
    found: set[str] = set()
    waiting = needs(paragraph, known)
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= needs(known[name], known) - found
    return found


def component(paragraph: Paragraph, *, compiled_in: bool = False) -> Component:
    """A Debian package as a component."""
    name, version, architecture = (paragraph[field] for field in ("Package", "Version", "Architecture"))
    purl = PackageURL("deb", "debian", name, version, {"arch": architecture, "distro": DISTRO})
    properties = [Property(name="ctkvr:use", value="compiled in")] if compiled_in else []
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=purl.to_string(),
        properties=properties,
    )


def program(paragraph: Paragraph, file: Path | None) -> Component:
    """ctkvr itself; with the digest of its package's file where there is one."""
    purl = PackageURL("deb", None, "ctkvr", paragraph["Version"], {"arch": paragraph["Architecture"]})
    digests = [hashlib.sha256(file.read_bytes()).hexdigest()] if file else []
    return Component(
        name="ctkvr",
        version=paragraph["Version"],
        type=ComponentType.APPLICATION,
        licenses=[DisjunctiveLicense(id="Apache-2.0")],
        purl=purl,
        bom_ref=purl.to_string(),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in digests],
    )


def bill(root: Component, names: Iterable[str], known: dict[str, Paragraph], needed: set[str]) -> Bom:
    """The bill of `root`, which needs `needed`, and of the packages `names`."""
    bom = Bom()
    bom.metadata.component = root
    parts = {name: component(known[name], compiled_in=name in COMPILED_IN) for name in sorted(names)}
    for name, part in parts.items():
        bom.components.add(part)
        bom.register_dependency(part, [parts[other] for other in sorted(needs(known[name], known)) if other in parts])
    bom.register_dependency(root, [parts[name] for name in sorted(needed)])
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    bom.metadata.timestamp = datetime.fromtimestamp(int(epoch), timezone.utc) if epoch else datetime.now(timezone.utc)
    references = "\n".join(str(part.bom_ref) for part in (root, *parts.values()))
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, references)
    return bom


def of_package(file: Path, status: Path = STATUS) -> Bom:
    """The bill of a package's file, its dependencies as this machine has them."""
    paragraph = DebFile(str(file)).debcontrol()
    known = installed(status)
    names = closure(paragraph, known)
    absent = [name for name in COMPILED_IN if name not in known]
    if absent:
        raise LookupError(f"{', '.join(absent)} not installed: this is not where the package was built")
    return bill(program(paragraph, file), names | set(COMPILED_IN), known, needs(paragraph, known) | set(COMPILED_IN))


def of_image(status: Path) -> Bom:
    """The bill of all that an image's status file names."""
    known = installed(status)
    if "ctkvr" not in known:
        raise LookupError(f"{status} names no installed ctkvr")
    paragraph = known.pop("ctkvr")
    return bill(program(paragraph, None), known, known, needs(paragraph, known))


def main() -> int:
    """Exit code 1 when a dependency cannot be found, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", choices=("package", "image"))
    parser.add_argument("file", type=Path, help="the package, or the image's dpkg status")
    arguments = parser.parse_args()
    try:
        bom = of_package(arguments.file) if arguments.of == "package" else of_image(arguments.file)
    except LookupError as error:
        sys.stderr.write(f"sbom.py: {error}\n")
        return 1
    sys.stdout.write(JsonV1Dot6(bom).output_as_string(indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
