# SPDX-License-Identifier: Apache-2.0
"""The image's target cpu, built whole from a bare Debian 12 and run as Kubernetes does: nobody special, read-only.

Minutes long, as root, with buildah, debootstrap and apt's mirror: `check` skips it on a machine without. Containers of
a machine without cgroups of its own cannot be run by podman, so the pieces are put together here: a network of its own,
a root file system that is mounted read-only, a user without capabilities.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import DEPLOY, ROOT, VERSION, run, until

MINUTES = 40 * 60


@dataclass
class Image:
    """What was built."""

    config: dict[str, Any]  # as docker knows it
    root: Path  # its file system, mounted


def mirror() -> str:
    """Where this machine's apt takes Debian 12 from."""
    fields = ("--format", "$(REPO_URI)", "Created-By: Packages", "Codename: bookworm")
    return sorted(run("apt-get", "indextargets", *fields).split())[0]


def cached(folder: Path) -> list[str]:
    """Flags that let the build use this machine's compiler cache, where there is one."""
    if not shutil.which("ccache"):
        return []
    config = folder / "ccache.conf"
    config.write_text("cache_dir = /ccache\nbase_dir = /src\nhash_dir = false\n")
    cache = run("ccache", "--get-config", "cache_dir").strip()
    Path(cache).mkdir(parents=True, exist_ok=True)
    return ["--volume", f"{config}:/etc/ccache.conf:ro", "--volume", f"{cache}:/ccache"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image, by the runbook's own command, on a base made here."""
    folder = tmp_path_factory.mktemp("image")
    storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", "overlay"]
    buildah = ["buildah", *storage]
    base = folder / "base"
    run("debootstrap", "--variant=minbase", "bookworm", str(base), mirror(), seconds=MINUTES)
    run("tar", "-C", str(base), "-c", ".", "-f", str(folder / "base.tar"))
    shutil.rmtree(base)
    container = run(*buildah, "from", "scratch").strip()
    run(*buildah, "add", "--quiet", container, str(folder / "base.tar"), "/")
    run(*buildah, "commit", "--quiet", "--rm", container, "localhost/debian:12")
    command = next(line.split() for line in (DEPLOY / "README.md").read_text().splitlines() if "buildah build" in line)
    command = ["localhost/debian:12".join(word.split("debian:12")) for word in command]
    here = ["--isolation", "chroot", "--pull-never", "--format", "docker", *cached(folder)]
    run(*buildah, "build", *here, *command[2:-1], str(ROOT), seconds=MINUTES)
    try:
        container = run(*buildah, "from", "--pull-never", f"ctkvr:{VERSION}").strip()
        described = json.loads(run(*buildah, "inspect", container))
        yield Image(described["Docker"]["config"], Path(run(*buildah, "mount", container).strip()))
    finally:
        run(*buildah, "rm", "--all")
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    """What Kubernetes is told of the container."""
    spec = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "statefulset.yml").read_text())["spec"]["template"]["spec"]
    return dict(spec)


class Container:
    """The image's entry point, running as `user`, with its root read-only and a loopback of its own."""

    def __init__(self, image: Image, *flags: str) -> None:
        self._root = shlex.quote(str(image.root))
        user, group = image.config["User"].split(":")
        confined = f"setpriv --reuid {user} --regid {group} --clear-groups --bounding-set=-all --no-new-privs"
        self._prefix = f"chroot {self._root} {confined}"
        begin = f"""
          ip link set lo up
          mount --bind {self._root} {self._root}
          mount -t proc proc {self._root}/proc
          mount --bind /dev {self._root}/dev
          mount -o remount,bind,ro {self._root}
          exec {self._prefix} {shlex.join([*image.config["Entrypoint"], *flags])}"""
        self.process = subprocess.Popen(["unshare", "--mount", "--net", "sh", "-euc", begin], stderr=subprocess.PIPE)

    def inside(self, *command: str, as_root: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs a command beside the entry point."""
        prefix = f"chroot {self._root}" if as_root else self._prefix
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--net"]
        return subprocess.run(
            [*enter, "sh", "-c", f"exec {prefix} {shlex.join(command)}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )


def test_it_holds_what_serves_and_nothing_of_the_build(image: Image) -> None:
    """Programs and their libraries; no compiler, no sources, no lists of packages."""
    for there in ("usr/bin/ctkvrd", "usr/bin/ctkvr-cli", "usr/share/doc/ctkvr/copyright"):
        assert (image.root / there).is_file()
    for absent in ("usr/bin/g++", "usr/bin/cmake", "src", "package"):
        assert not (image.root / absent).exists()
    assert not list((image.root / "var/lib/apt/lists").glob("*Packages*"))


def test_it_says_how_it_is_run(image: Image, pod: dict[str, Any]) -> None:
    """User, ports, entry point, signal, probe: as Kubernetes has them."""
    security = pod["securityContext"]
    assert image.config["User"] == f"{security['runAsUser']}:{security['runAsGroup']}"
    ports = {f"{port['containerPort']}/tcp" for port in pod["containers"][0]["ports"]}
    assert set(image.config["ExposedPorts"]) == ports
    assert image.config["Entrypoint"] == ["/usr/bin/ctkvrd"]
    assert image.config["StopSignal"] == "SIGTERM"
    assert image.config["Healthcheck"]["Test"][0] == "CMD"


def test_it_serves_as_nobody_special_from_a_read_only_root(image: Image) -> None:
    """The probe fails before it serves and passes then; a call is answered; the stop signal drains it."""
    probe = image.config["Healthcheck"]["Test"][1:]
    container = Container(image, "--arena_bytes=64MiB", "--lanes=1")
    try:
        until(lambda: container.inside(*probe).returncode == 0)
        status = Path(f"/proc/{container.process.pid}/status").read_text()
        user, group = image.config["User"].split(":")
        for field, value in (("Uid", user), ("Gid", group)):
            assert f"{field}:\t{value}\t{value}\t{value}\t{value}\n" in status
        assert "CapEff:\t0000000000000000\n" in status
        assert "NoNewPrivs:\t1\n" in status
        written = container.inside("touch", "/written", as_root=True)
        assert written.returncode != 0
        assert "Read-only file system" in written.stdout
        assert container.inside("ctkvr-cli", "bench", "--tokens", "1024", "--retrievals", "5").returncode == 0
    finally:
        container.process.terminate()
    assert container.process.wait(timeout=60) == 0
    assert subprocess.run(["unshare", "--net", "chroot", str(image.root), *probe], check=False).returncode == 1


def test_its_bill_of_materials_can_be_written(image: Image) -> None:
    """By the runbook's way: of the image's own list of packages."""
    status = image.root / "var/lib/dpkg/status"
    bom = json.loads(run(sys.executable, str(DEPLOY / "sbom.py"), "image", str(status)))
    assert bom["metadata"]["component"]["version"] == VERSION
    assert {"libc6", "libgrpc++1.51", "libprotobuf32"} <= {part["name"] for part in bom["components"]}
