# SPDX-License-Identifier: Apache-2.0
"""Each overlay is what Kubernetes takes, and says what the program says: ports, flags, memory, drain."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import DEPLOY, VERSION, Server, metric_names, parse_bytes, program, run

OVERLAYS = sorted(path.parent.name for path in DEPLOY.glob("kubernetes/overlays/*/kustomization.yml"))
KUBERNETES = "1.32"

Objects = dict[str, dict[str, Any]]


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, kubectl: str, tmp_path: Path) -> Path:
    """The file that kubectl would apply."""
    file = tmp_path / "overlay.yml"
    file.write_text(run(kubectl, "kustomize", str(DEPLOY / "kubernetes" / "overlays" / request.param)))
    return file


@pytest.fixture
def objects(overlay: Path) -> Objects:
    """Its objects, by kind and name."""
    found: Objects = {}
    for item in yaml.safe_load_all(overlay.read_text()):
        name = f"{item['kind']}/{item['metadata']['name']}"
        assert name not in found
        found[name] = item
    return found


@pytest.fixture
def pod(objects: Objects) -> dict[str, Any]:
    """The pod of the StatefulSet."""
    spec: dict[str, Any] = objects["StatefulSet/ctkvr"]["spec"]["template"]["spec"]
    assert len(spec["containers"]) == 1
    return spec


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the mounted secrets hold: certificates, and who may call."""
    folder = tmp_path_factory.mktemp("secret")
    made = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=ctkvr", *made)
    (folder / "ca.crt").write_text((folder / "tls.crt").read_text())
    digest = hashlib.sha256(b"a token").hexdigest()
    (folder / "access.toml").write_text(f'[[tenant]]\nname = "research"\ntokens = [{{sha256 = "{digest}"}}]\n')
    return folder


@pytest.fixture
def config(objects: Objects, pod: dict[str, Any], tmp_path: Path, secret: Path) -> dict[str, str]:
    """The settings that the pod's program runs with: the mounted file, read by the program, the memory limit aside."""
    mount, volume = pod["containers"][0]["volumeMounts"][0], pod["volumes"][0]
    assert mount["name"] == volume["name"]
    (name, text), *more = objects[f"ConfigMap/{volume['configMap']['name']}"]["data"].items()
    assert not more
    assert pod["containers"][0]["args"] == [f"--config={mount['mountPath']}/{name}"]
    file = tmp_path / name
    # This machine may be smaller than the pod's, and has another folder for certificates.
    for more_mount, more_volume in zip(pod["containers"][0]["volumeMounts"][1:], pod["volumes"][1:], strict=True):
        assert more_mount["name"] == more_volume["name"]
        assert (
            text.count(more_mount["mountPath"])
            == {"ctkvr-tls": 3, "ctkvr-access": 1}[more_volume["secret"]["secretName"]]
        )
        text = text.replace(more_mount["mountPath"], str(secret))
    file.write_text(re.sub(r"^arena_bytes = .*$", "", text, flags=re.MULTILINE))
    printed = run(program("CTKVRD"), "--config", str(file), "--print-config")
    run(program("CTKVRD"), "--config", str(file), "--check-config")
    values = dict(re.findall(r'^(\w+) = "?(.*?)"?$', printed, re.MULTILINE))
    values |= dict(re.findall(r'^(arena_bytes) = "(.*)"$', text, re.MULTILINE))
    return values


def test_overlays_are_found() -> None:
    """Those that the runbook names."""
    assert OVERLAYS
    runbook = (DEPLOY / "README.md").read_text()
    for name in OVERLAYS:
        assert f"kubernetes/overlays/{name}" in runbook


def test_objects_fit_their_schemas(overlay: Path) -> None:
    """Kubernetes' own, and strictly: no unknown field. The operator's kinds have none there."""
    printed = run("kubernetes-validate", "--strict", "-k", KUBERNETES, str(overlay))
    passed = re.findall(r"passed for resource (\w+)/", printed)
    unknown = re.findall(r"Couldn't find schema for kind (\w+)", printed)
    assert len(passed) + len(unknown) == len(list(yaml.safe_load_all(overlay.read_text())))
    assert unknown == ["PodMonitor"]


def test_a_misspelt_field_does_not_fit(overlay: Path, tmp_path: Path) -> None:
    """The check above can fail."""
    file = tmp_path / "wrong.yml"
    file.write_text(overlay.read_text().replace("readinessProbe:", "readynessProbe:"))
    run("kubernetes-validate", "--strict", "-k", KUBERNETES, str(file), status=1)


def test_selectors_select_the_pod(objects: Objects) -> None:
    """None is empty, which would mean every pod, and each matches."""
    labels = objects["StatefulSet/ctkvr"]["spec"]["template"]["metadata"]["labels"].items()
    selected = 0
    for name, item in objects.items():
        spec = item.get("spec", {})
        for key in ("selector", "podSelector"):
            if key in spec:
                wanted = spec[key].get("matchLabels", spec[key] if name.startswith("Service/") else {})
                assert wanted, f"{name}: an empty {key}"
                assert wanted.items() <= labels, f"{name}: {key} does not match"
                selected += 1
    assert selected == 6  # two services, the set, the budget, the policy, the monitor


def test_ports_are_those_of_the_configuration(objects: Objects, pod: dict[str, Any], config: dict[str, str]) -> None:
    """Container, probes, services, policy and monitor."""
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert config["listen_address"].endswith(f":{ports['grpc']}")
    assert config["metrics_address"].endswith(f":{ports['metrics']}")
    help_text = run(program("CTKVRD"), "--help")
    assert f':{ports["grpc"]}"; CTKVR_LISTEN_ADDRESS' in help_text  # the program's own defaults
    assert f':{ports["metrics"]}"; CTKVR_METRICS_ADDRESS' in help_text
    # The kubelet asks gRPC in plaintext alone.
    asked = (
        {"httpGet": {"path": "/metrics", "port": "metrics"}} if config["tls_key"] else {"grpc": {"port": ports["grpc"]}}
    )
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert asked.items() <= pod["containers"][0][probe].items()
    for name in ("Service/ctkvr", "Service/ctkvr-headless"):
        (port,) = objects[name]["spec"]["ports"]
        assert (port["port"], port["targetPort"]) == (ports["grpc"], "grpc")
    allowed = [rule["ports"] for rule in objects["NetworkPolicy/ctkvr"]["spec"]["ingress"]]
    assert allowed == [[{"port": "grpc", "protocol": "TCP"}], [{"port": "metrics", "protocol": "TCP"}]]
    (endpoint,) = objects["PodMonitor/ctkvr"]["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")


def test_admin_is_for_who_is_in_the_pod(objects: Objects, pod: dict[str, Any], config: dict[str, str]) -> None:
    """It listens on the pod's loopback, and no port, service or policy leads to it."""
    address, _, port = config["admin_address"].rpartition(":")
    assert address == "127.0.0.1"
    assert int(port) not in [port["containerPort"] for port in pod["containers"][0]["ports"]]
    for name in ("Service/ctkvr", "Service/ctkvr-headless"):
        assert [port["name"] for port in objects[name]["spec"]["ports"]] == ["grpc"]


def test_the_grace_period_outlasts_the_drain(pod: dict[str, Any], config: dict[str, str]) -> None:
    """Time to leave the services, to finish calls and to end; and liveness is slower than a drain."""
    container = pod["containers"][0]
    leaving = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = int(config["drain_seconds"])
    assert pod["terminationGracePeriodSeconds"] >= leaving + drain + 5
    assert container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"] > drain


def test_memory_is_what_the_formula_asks(pod: dict[str, Any], config: dict[str, str]) -> None:
    """Arena, scratch of each lane, slot tables, messages and the program; no more than a tenth above."""
    resources = pod["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    lanes = int(config["lanes"])
    assert resources["limits"]["cpu"] == lanes
    needed = parse_bytes(config["arena_bytes"]) + lanes * parse_bytes(config["scratch_bytes"]) + 2 * 2**30
    limit = parse_bytes(resources["limits"]["memory"].replace("Gi", "GiB"))
    assert needed <= limit <= 1.1 * needed


def test_the_pod_is_confined(objects: Objects, pod: dict[str, Any]) -> None:
    """As Pod Security's level restricted asks, and read-only besides."""
    assert objects["Namespace/ctkvr"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    # Else a service called ctkvr would hand in CTKVR_PORT and more.
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_plaintext_goes_with_a_policy_on_who_may_connect(objects: Objects, config: dict[str, str]) -> None:
    """No rule lets everyone in, and the server calls nobody. With TLS it is the page of metrics that is plain."""
    assert config["allow_plaintext"] == "true"
    spec = objects["NetworkPolicy/ctkvr"]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == []
    assert all(peer["namespaceSelector"]["matchLabels"] for rule in spec["ingress"] for peer in rule["from"])


def test_the_image_is_this_version(pod: dict[str, Any]) -> None:
    """The version that CMake gives the program."""
    assert pod["containers"][0]["image"] == f"ctkvr:{VERSION}"
    assert run(program("CTKVRD"), "--version") == f"ctkvrd {VERSION}\n"


def test_the_autoscaler_reads_a_recorded_series(server: Server) -> None:
    """Its metric is what the adapter's rule beside it makes of a series that rules record; it only adds servers."""
    file = DEPLOY / "kubernetes" / "overlays" / "ha" / "autoscaler.yml"
    scaler = yaml.safe_load(file.read_text())["spec"]
    (metric,) = scaler["metrics"]
    adapter = re.search(r"seriesQuery: '([^{]+)\{.*?name: \{as: (\w+)\}", file.read_text(), re.DOTALL)
    assert adapter
    assert adapter.group(2) == metric["pods"]["metric"]["name"]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    recorded = {rule["record"]: rule["expr"] for group in rules for rule in group["rules"] if "record" in rule}
    assert all(f"{name} " in server.page() for name in metric_names(recorded[adapter.group(1)]))
    assert scaler["behavior"]["scaleDown"] == {"selectPolicy": "Disabled"}
    assert scaler["scaleTargetRef"]["name"] == "ctkvr"
