"""The files under deploy/ against the schemas of those who read them: Ray, Kubernetes, KubeRay, Prometheus, Docker, and
Baton itself; and every metric that an alert or a panel names against what processes show."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import controller.metrics
import router.observe.metrics
from cluster.config.load import load_config

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
RAY_FILES = sorted((DEPLOY / "ray").glob("*.yaml"))
KUBERNETES = "1.34"
PROMETHEUS = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMETHEUS is None, reason="needs promtool (Debian: apt install prometheus)")


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def with_what_it_names(file: Path, folder: Path) -> Path:
    """The file where the model, keys and certificates lie beside it, as they do in the home folder of a machine."""
    (folder / "models").mkdir()
    (folder / "models" / "served").symlink_to(ROOT / "models" / "tiny-shakespeare")
    (folder / "tls").mkdir()
    for name in ("keys.yaml", "tls/node.pem", "tls/node.key", "tls/ca.pem"):
        (folder / name).touch()
    text = file.read_text(encoding="utf-8")
    text = text.replace("/etc/baton-secrets/keys.yaml", "keys.yaml").replace("/etc/baton-secrets/", "tls/")
    (folder / "cluster.yaml").write_text(text.replace("path: /models/", "path: models/"), encoding="utf-8")
    return folder / "cluster.yaml"


def test_there_is_a_file_for_each_kind_of_cluster() -> None:
    assert [path.name for path in RAY_FILES] == ["aws.yaml", "gcp.yaml", "on-premise.yaml"]


@pytest.mark.parametrize("path", [*RAY_FILES, DEPLOY / "kubernetes" / "cluster.yaml"], ids=lambda path: path.name)
def test_batons_part_of_a_file_is_valid_and_closed_to_strangers(path: Path, tmp_path: Path) -> None:
    config = load_config(with_what_it_names(path, tmp_path))
    assert config.engine.device == "cuda" and config.engine.block_size == "auto"
    assert config.placement.labels, "workers go to nodes with GPUs"
    assert config.auth.keys_file and config.tls.cert and config.internal_tls.ca
    assert not config.router.insecure and not config.admin.insecure


def test_ray_takes_the_files() -> None:
    """By the checks of `ray up` before it starts anything; the clouds' own part needs their accounts."""
    program = (
        "import sys, yaml\n"
        "from ray.autoscaler._private.util import prepare_config, validate_config\n"
        "for path in sys.argv[1:]:\n"
        "    config = prepare_config(yaml.safe_load(open(path)))\n"
        "    validate_config(config)\n"
        "    print('head:', config['head_node_type'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, RAY_FILES)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^head: (.*)$", done.stdout, re.MULTILINE) == ["head", "head", "local.cluster.node"]


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda path: path.name)
def test_ray_starts_with_token_and_tls_and_then_baton(path: Path) -> None:
    (config,) = documents(path)
    head, worker = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    assert [command.split()[0:2] for command in (head[0], worker[0])] == [["ray", "stop"]] * 2
    assert all(command.startswith(". ~/ray.env && ") for command in (*head[1:], *worker[1:]))
    assert "baton serve --address auto --detach --config ~/ray_bootstrap_config.yaml" in head[-1]
    mounted = {Path(there).name for there in config["file_mounts"]}
    environment = (DEPLOY / "ray" / "ray.env").read_text(encoding="utf-8")
    assert "RAY_AUTH_MODE=token" in environment and "RAY_USE_TLS=1" in environment
    named = set(re.findall(r"\$HOME/tls/(\S+)", environment))
    made_there = {"node.pem", "node.key"} if any("certificate.sh" in c for c in config["setup_commands"]) else set()
    assert named <= mounted | made_there
    for here in config["file_mounts"].values():
        assert (ROOT / here).exists() or here.split("/")[0] in ("tls", "keys.yaml"), here


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda path: path.name)
def test_node_types_offer_the_labels_and_gpus_that_workers_ask_for(path: Path) -> None:
    (config,) = documents(path)
    serving = config["metadata"]["serving"]
    (label,) = serving["placement"]["labels"]
    key, _, value = label.partition("=")
    if config["provider"]["type"] == "local":
        assert f"--labels={label}" in config["worker_start_ray_commands"][-1]
        assert f"--labels={label}" not in config["head_start_ray_commands"][1]
        return
    types = config["available_node_types"]
    fitting = [each for each in types.values() if each["labels"].get(key) == value]
    assert types[config["head_node_type"]] not in fitting
    gpus = sum(each["resources"]["GPU"] * each["min_workers"] for each in fitting)
    assert gpus >= sum(role["devices"] for role in serving["roles"].values())
    assert all(each["resources"]["GPU"] % serving["roles"]["decode"]["tensor_parallel"] == 0 for each in fitting)


@pytest.mark.parametrize("hosts", [["192.0.2.1", "192.0.2.2"], ["fe80::1", "head.example"]])
def test_certificates_carry_the_addresses_and_the_name_baton(hosts: list[str], tmp_path: Path) -> None:
    subprocess.run(["bash", DEPLOY / "ray" / "authority.sh", *hosts], cwd=tmp_path, check=True, timeout=60)
    shown = subprocess.run(
        ["openssl", "x509", "-in", "tls/node.pem", "-noout", "-text"], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert "DNS:baton" in shown
    assert all(host.upper().replace("FE80::1", "FE80:0:0:0:0:0:0:1") in shown.upper() for host in hosts)
    verify = ["openssl", "verify", "-CAfile", "tls/ca.pem", "tls/node.pem"]
    assert subprocess.run(verify, cwd=tmp_path, capture_output=True, timeout=60).returncode == 0
    assert (tmp_path / "tls" / "node.key").stat().st_mode & 0o77 == 0
    before = (tmp_path / "tls" / "ca.pem").read_bytes(), (tmp_path / "tls" / "ray-token").read_bytes()
    subprocess.run(["bash", DEPLOY / "ray" / "authority.sh", *hosts], cwd=tmp_path, check=True, timeout=60)
    assert before == ((tmp_path / "tls" / "ca.pem").read_bytes(), (tmp_path / "tls" / "ray-token").read_bytes())


# Kubernetes

CRD = {
    "spec": {
        *("headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions"),
        *(
            "authOptions",
            "suspend",
            "gcsFaultToleranceOptions",
            "headServiceAnnotations",
            "managedBy",
            "upgradeStrategy",
        ),
    },
    "headGroupSpec": {
        "template",
        "rayStartParams",
        "labels",
        "resources",
        "serviceType",
        "headService",
        "enableIngress",
    },
    "workerGroupSpec": {
        *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template", "labels"),
        *("resources", "scaleStrategy", "idleTimeoutSeconds", "suspend"),
    },
    "autoscalerOptions": {
        *("version", "idleTimeoutSeconds", "upscalingMode", "resources", "image", "imagePullPolicy", "env", "envFrom"),
        *("volumeMounts", "securityContext"),
    },
}
"""The keys of KubeRay's RayCluster (ray.io/v1, 1.6); its pod templates are Kubernetes' own."""


def ray_cluster() -> dict[str, Any]:
    (document,) = documents(DEPLOY / "kubernetes" / "raycluster.yaml")
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayCluster")
    spec: dict[str, Any] = document["spec"]
    return spec


def test_a_ray_cluster_has_only_the_keys_of_kuberay() -> None:
    spec = ray_cluster()
    assert set(spec) <= CRD["spec"]
    assert set(spec["headGroupSpec"]) <= CRD["headGroupSpec"]
    assert set(spec["autoscalerOptions"]) <= CRD["autoscalerOptions"]
    for group in spec["workerGroupSpecs"]:
        assert set(group) <= CRD["workerGroupSpec"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    groups = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    assert spec["authOptions"] == {"mode": "token"}


def test_its_pods_and_what_stands_beside_them_are_kubernetes_own() -> None:
    spec = ray_cluster()
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        template = group["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    objects = documents(DEPLOY / "kubernetes" / "service.yaml")
    assert [each["kind"] for each in objects] == ["Service", "PodDisruptionBudget", "NetworkPolicy"]
    for each in objects:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects[0] | {"spec": {"port": 1}}, KUBERNETES, strict=True)


def test_pods_write_nowhere_but_in_volumes_and_only_the_autoscaler_has_a_token() -> None:
    spec = ray_cluster()
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            locked = container["securityContext"]
            assert locked["readOnlyRootFilesystem"] is True and locked["allowPrivilegeEscalation"] is False
            assert locked["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert {path for path, volume in mounts.items() if "emptyDir" in volume} == {
                "/dev/shm",
                "/tmp",
                "/home/baton",
            }
            assert "api-token" not in {volume["name"] for volume in mounts.values()}
    (mount,) = spec["autoscalerOptions"]["volumeMounts"]
    head = {volume["name"]: volume for volume in spec["headGroupSpec"]["template"]["spec"]["volumes"]}
    assert "serviceAccountToken" in str(head[mount["name"]]["projected"]["sources"])


def test_no_install_looks_for_a_package_in_two_indexes() -> None:
    """Whoever has a higher version of any name in one of them would have it installed."""
    files = [ROOT / "Makefile", *(DEPLOY / "docker").iterdir(), *(DEPLOY / "ray").iterdir(), *(ROOT / ".ci").iterdir()]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    commands = {name: re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE) for name, text in texts.items()}
    assert not [name for name, text in commands.items() if "extra-index-url" in text]
    asked = [
        text.partition("--index-url")[0].rsplit("pip install", 1)[1]
        for text in commands.values()
        if "--index-url" in text
    ]
    assert asked and all("--no-deps" in text for text in asked)


@pytest.mark.parametrize("file", ["Makefile", "deploy/docker/Dockerfile.cpu", "deploy/docker/Dockerfile.cuda"])
def test_what_a_lock_names_is_held_against_its_hashes(file: str) -> None:
    text = re.sub(r"\\\n\s*", " ", (ROOT / file).read_text(encoding="utf-8"))
    commands = [line for line in re.split(r"\n|&&|;", text) if "pip install" in line]
    from_locks = [line for line in commands if ".lock" in line or "$$locks" in line]
    assert from_locks and all("--require-hashes --no-deps" in line for line in from_locks)
    (built,) = [line for line in commands if "--no-index" in line]
    assert "--no-build-isolation" in built, "else pip fetches what builds Baton"


def test_the_service_leads_to_ports_of_the_head_and_workers_fit_their_machines() -> None:
    spec = ray_cluster()
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    service = documents(DEPLOY / "kubernetes" / "service.yaml")[0]
    named = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]}.items() <= named.items()
    serving = documents(DEPLOY / "kubernetes" / "cluster.yaml")[0]["metadata"]["serving"]
    assert (named["grpc"], named["http"]) == (serving["router"]["port"], serving["router"]["http_port"])
    (group,) = spec["workerGroupSpecs"]
    assert [f"{key}={value}" for key, value in group["labels"].items()] == serving["placement"]["labels"]
    (worker,) = group["template"]["spec"]["containers"]
    gpus = int(worker["resources"]["limits"]["nvidia.com/gpu"]) * group["minReplicas"]
    assert gpus >= sum(role["devices"] for role in serving["roles"].values())
    assert str(spec["rayVersion"]) in (ROOT / "constraints.txt").read_text(encoding="utf-8")


# Docker


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_dockerfile_builds_in_layers_as_a_user_without_rights(name: str) -> None:
    """No builder is here: instructions, stages and copied paths are held against one another."""
    text = (DEPLOY / "docker" / f"Dockerfile.{name}").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    code = [line for line in lines if line.strip() and not line.startswith("#")]
    known = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "EXPOSE", "CMD", "STOPSIGNAL"}
    assert {line.split()[0] for line in code} <= known
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    arguments = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    for number, (base, _) in enumerate(stages):
        variable = re.fullmatch(r"\$\{(\w+)\}", base)
        assert variable[1] in arguments if variable else base in {stage for _, stage in stages[:number]}
    assert set(re.findall(r"--from=(\S+)", text)) <= {stage for _, stage in stages}
    first = next(i for i, line in enumerate(code) if line.startswith("COPY constraints.txt requirements.lock"))
    whole = next(i for i, line in enumerate(code) if line == "COPY . .")
    installed = next(i for i, line in enumerate(code) if "--requirement requirements.lock" in line)
    assert first < installed < whole, "dependencies are a layer of their own"
    assert [line for line in code if line.startswith("USER")][-1] == "USER 1000", (
        "a number, by which Kubernetes sees that it is not root"
    )
    assert all("rm -rf /var/lib/apt/lists" in line for line in code if "apt-get install" in line)
    assert all("--no-install-recommends" in line for line in code if "apt-get install" in line)
    assert not re.search(r"ADD |latest|sudo|curl .*\|", text)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint")
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_hadolint_finds_nothing_in_a_dockerfile(name: str) -> None:
    """But versions of system packages that are not pinned: their security fixes are wanted."""
    command = ["hadolint", "--ignore=DL3008", "--ignore=DL3013", str(DEPLOY / "docker" / f"Dockerfile.{name}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_every_package_gets_into_the_image() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^packages = \[(.*)\]$", project, re.MULTILINE)
    assert found is not None
    wanted = set(re.findall(r'"(\w+)"', found[1]))
    assert wanted | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "cluster.yaml"} <= kept
    assert all((ROOT / path).exists() for path in kept)


# Prometheus and Grafana


NOT_SHOWN = {"baton_auto_moves_total", "baton_trace_spans_total", "baton_steps_total", "baton_step_tokens_total"}
NOT_SHOWN |= {"baton_step_seconds_total", "baton_step_flops_total", "baton_step_bytes_total"}
NOT_SHOWN |= {"baton_device_peak_flops", "baton_device_peak_bytes_per_second"}
"""By the dashboard: what others of it are made of, and what has no series in most clusters."""


def known_metrics() -> dict[str, dict[str, tuple[str, ...]]]:
    """Each metric of each process, with the values of its labels. The worker's module needs torch to be there."""
    import worker.metrics
    import worker.step_meter

    of_workers = (*worker.metrics.METRICS, *worker.step_meter.METRICS)
    every = (*router.observe.metrics.METRICS, *of_workers, *controller.metrics.METRICS)
    return {metric.name: dict(metric.labels) for metric in every}


def expressions() -> Iterator[tuple[str, str]]:
    (alerts,) = documents(DEPLOY / "prometheus" / "alerts.yml")
    for group in alerts["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])
    for panel in json.loads((DEPLOY / "grafana" / "baton.json").read_text(encoding="utf-8"))["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))


def base_name(name: str, known: dict[str, Any]) -> str:
    without = re.sub(r"_(bucket|sum|count)$", "", name)
    return name if name in known else without


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_what_an_expression_names_exists(where: str, expression: str) -> None:
    known = known_metrics()
    for name, matchers in re.findall(r"\b(baton_\w+)(?:\{([^}]*)\})?", expression):
        metric = base_name(name, known)
        assert metric in known, f"{where}: {name} is no metric of Baton's"
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=|!~)"([^"]*)"', matchers):
            values = known[metric].get(label)
            if label == "le":
                continue
            assert values is not None, f"{where}: {metric} has no label {label}"
            wanted = value.split("|") if "~" in operator else [value]
            assert set(wanted) <= set(values), f"{where}: {metric} has no {label} {value}"
    labels = {label for each in known.values() for label in each} | {"le", "process"}
    for by in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in by.split(",")} <= labels, where


def test_the_dashboard_shows_every_metric_and_each_panel_says_what() -> None:
    known = known_metrics()
    shown = {base_name(name, known) for _, text in expressions() for name in re.findall(r"\bbaton_\w+", text)}
    assert set(known) - shown <= NOT_SHOWN
    dashboard = json.loads((DEPLOY / "grafana" / "baton.json").read_text(encoding="utf-8"))
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["SLO", "Traffic", "Saturation", "P/D balance", "Cache", "Faults"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(0 <= panel["gridPos"]["x"] <= 24 - panel["gridPos"]["w"] for panel in dashboard["panels"])


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]],
    ids=" ".join,
)
def test_prometheus_takes_its_files(arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    (folder / "tls").mkdir()
    (folder / "tls" / "ca.pem").touch()
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
