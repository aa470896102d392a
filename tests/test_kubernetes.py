"""Consistency of deploy/kubernetes with the programs: every variable, flag, route, metric, port and time is real."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine.http.app import LAST_WORDS_S
from engine.http.description import ROUTES as ENGINE_ROUTES
from gateway.lifecycle import FLUSH_SECONDS
from gateway.metrics import Metrics
from gateway.route_table import ROUTES as GATEWAY_ROUTES
from gateway.settings import Settings, env_name
from loraplex.cli import main

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS = [made for file in KUSTOMIZATION["resources"] for made in yaml.safe_load_all((FOLDER / file).read_text())]
MONITORING = FOLDER / "monitoring"
MONITORS = list(yaml.safe_load_all((MONITORING / "servicemonitors.yaml").read_text()))
RULES = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())
SCHEMAS = json.loads((ROOT / "tests/schemas/kubernetes-1.34.json").read_text())
OPERATORS_SCHEMAS = json.loads((ROOT / "tests/schemas/prometheus-operator-0.80.json").read_text())
# The values that deploy/README.md puts into the secret.
README = (ROOT / "deploy/README.md").read_text()
SECRETS = dict(re.findall(r"--from-literal=(LORAPLEX_\w+)=(\S+)", README))


def the(kind: str, name: str) -> Any:
    [found] = [made for made in OBJECTS if (made["kind"], made["metadata"]["name"]) == (kind, name)]
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for made in OBJECTS:
        if made["kind"] in ("StatefulSet", "Job"):
            yield made["metadata"]["name"], made["spec"]["template"]["spec"]


PODS = dict(pods())
CONFIG = the("ConfigMap", "loraplex")["data"]


def container(name: str) -> dict[str, Any]:
    [only] = PODS[name]["containers"]
    return only


def test_every_file_is_applied():
    files = {path.name for path in FOLDER.iterdir()} - {"monitoring"}
    assert files == {"kustomization.yaml", *KUSTOMIZATION["resources"]}
    assert {container(name)["image"] for name in PODS} == {image["name"] for image in KUSTOMIZATION["images"]}


def problems(made: dict[str, Any], schemas: dict[str, Any] = SCHEMAS) -> list[str]:
    """Return what the schema of an object's kind says against it, by default Kubernetes' own."""
    schema = {"definitions": schemas["definitions"], "allOf": [schemas["kinds"][made["kind"]]]}
    return [f"{list(error.path)}: {error.message}" for error in jsonschema.Draft7Validator(schema).iter_errors(made)]


def test_each_object_fits_kubernetes_own_schema():
    assert {f"{made['kind']}/{made['metadata']['name']}": problems(made) for made in OBJECTS if problems(made)} == {}
    misspelt = json.loads(json.dumps(the("StatefulSet", "gateway")).replace("livenessProbe", "livelinessProbe"))
    assert "livelinessProbe" in problems(misspelt)[0]


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "message"),
    [
        ("ServiceMonitor", '"interval"', '"intervall"', "'intervall'"),
        ("ServiceMonitor", '"matchLabels"', '"matchLabel"', "'matchLabel'"),
        ("ServiceMonitor", '"10s"', '"10 s"', "'10 s' does not match"),
        ("PrometheusRule", '"for": "1m"', '"for": "1 minute"', "'1 minute' does not match"),
        ("PrometheusRule", '"annotations"', '"annotation"', "'annotation'"),
        ("PrometheusRule", '"expr"', '"expression"', "'expression'"),
    ],
)
def test_each_monitor_and_rule_fits_the_operators_schema(kind: str, right: str, wrong: str, message: str):
    made = [each for each in (*MONITORS, RULES) if each["kind"] == kind]
    assert made
    for each in made:
        assert (each["apiVersion"], problems(each, OPERATORS_SCHEMAS)) == ("monitoring.coreos.com/v1", [])
        misspelt = json.dumps(each).replace(right, wrong)
        assert misspelt != json.dumps(each)
        assert any(message in problem for problem in problems(json.loads(misspelt), OPERATORS_SCHEMAS))


@pytest.mark.parametrize("components", ["", "\ncomponents: [monitoring]\n"], ids=["plain", "monitoring"])
def test_kustomize_renders_the_folder(components: str, tmp_path: Path):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    with (tmp_path / "kubernetes/kustomization.yaml").open("a") as file:
        file.write(components)
    ran = subprocess.run([kubectl, "kustomize", str(tmp_path / "kubernetes")], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    rendered = list(yaml.safe_load_all(ran.stdout))
    expected = OBJECTS + ([*MONITORS, RULES] if components else [])
    named = sorted((made["kind"], made["metadata"]["name"]) for made in expected)
    assert sorted((made["kind"], made["metadata"]["name"]) for made in rendered) == named
    assert [problems(made) for made in rendered if made["kind"] in SCHEMAS["kinds"] and problems(made)] == []
    images = set(re.findall(r"image: (\S+)", ran.stdout.decode()))
    assert images == {f"{image['newName']}:{image['newTag']}" for image in KUSTOMIZATION["images"]}


def test_the_migration_can_run_again():
    job = the("Job", "migrate")
    # A job's template cannot be changed: it is gone, or deleted by its hook, before the next release is applied.
    assert job["spec"]["ttlSecondsAfterFinished"] <= 60
    annotations = job["metadata"]["annotations"]
    assert annotations["argocd.argoproj.io/hook-delete-policy"] == "BeforeHookCreation"
    assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation"
    assert "pre-upgrade" in annotations["helm.sh/hook"]


def test_secrets_are_only_referred_to():
    assert not [made for made in OBJECTS if made["kind"] == "Secret"]
    assert not re.search("TOKEN|KEY|PEPPER|PASSWORD|DATABASE_URL", " ".join(CONFIG))


def test_each_pod_has_a_network_policy_and_a_public_port_only_the_gateway():
    policies = {p["metadata"]["name"]: p["spec"] for p in OBJECTS if p["kind"] == "NetworkPolicy"}
    assert policies.keys() == PODS.keys()
    labels = {"migrate": the("Job", "migrate")["spec"]["template"]["metadata"]["labels"]}
    for name in ("gateway", "engine"):
        labels[name] = the("StatefulSet", name)["spec"]["template"]["metadata"]["labels"]
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"] == labels[name]
        assert "Ingress" in policy["policyTypes"]
    rules = [(name, rule) for name, policy in policies.items() for rule in policy.get("ingress", [])]
    anyone = {(name, port["port"]) for name, rule in rules if "from" not in rule for port in rule["ports"]}
    assert anyone == {("gateway", "http")}
    assert {"podSelector": {"matchLabels": {"app": "gateway"}}} in policies["engine"]["ingress"][0]["from"]


def test_prometheus_scrapes_each_program_under_the_names_of_the_alerts():
    services = [made for made in OBJECTS if made["kind"] == "Service"]
    for monitor in MONITORS:
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        [service] = [each for each in services if wanted <= each["metadata"]["labels"].items()]
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == monitor["metadata"]["name"]
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert {monitor["metadata"]["name"] for monitor in MONITORS} == {"gateway", "engine"}


def test_the_rule_manifest_has_the_alerts_of_prometheus(tmp_path: Path):
    assert RULES["kind"] == "PrometheusRule"
    assert RULES["spec"] == yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())
    files = set(yaml.safe_load((MONITORING / "kustomization.yaml").read_text())["resources"])
    assert files == {"servicemonitors.yaml", "prometheusrule.yaml"}
    # The generator changes nothing as long as the rules are the same, comments included.
    copy = tmp_path / "kubernetes" / "monitoring"
    shutil.copytree(MONITORING, copy)
    shutil.copy(ROOT / "deploy/alerts.yml", tmp_path)
    (copy / "prometheusrule.yaml").unlink()
    subprocess.run([sys.executable, str(copy / "make_rules.py")], check=True)
    assert (copy / "prometheusrule.yaml").read_text() == (MONITORING / "prometheusrule.yaml").read_text()


def test_the_gateways_environment_is_a_whole_configuration(tmp_path: Path):
    known = {env_name(field.name) for field in fields(Settings)}
    assert CONFIG.keys() | SECRETS.keys() <= known
    assert not CONFIG.keys() & SECRETS.keys()
    for name in ("gateway", "migrate"):
        sources = container(name)["envFrom"]
        assert sources == [{"configMapRef": {"name": "loraplex"}}, {"secretRef": {"name": "loraplex-secrets"}}]
    (tmp_path / "config.json").write_text("{}")
    given = {**SECRETS, "LORAPLEX_DATABASE_URL": "postgresql://u:p@h/d", "LORAPLEX_REDIS_URL": "rediss://h:6379/0"}
    for name in ("LORAPLEX_INTERNAL_TOKEN", "LORAPLEX_ADMIN_KEY", "LORAPLEX_KEY_PEPPER"):
        given[name] = f"a long enough value of {name}"
    settings = Settings.load({**CONFIG, **given, "LORAPLEX_MODEL_DIR": str(tmp_path)})
    ports = {port["name"]: port["containerPort"] for port in container("gateway")["ports"]}
    assert ports == {"http": settings.port, "metrics": settings.metrics_port}
    assert settings.engines == (f"dns://{the('Service', 'engine')['metadata']['name']}:8000",)


@pytest.mark.parametrize("name", PODS)
def test_each_program_takes_its_flags_and_variables(name: str):
    command, *arguments = container(name)["args"]
    main.commands[command].make_context(command, arguments)
    for variable in container(name).get("env", []):
        source = variable["valueFrom"]
        reference = source.get("configMapKeyRef") or source["secretKeyRef"]
        assert reference["key"] == variable["name"]
        assert variable["name"] in (CONFIG if "configMapKeyRef" in source else SECRETS)
    used = re.findall(r"\$\((\w+)\)", " ".join(arguments))
    assert set(used) <= {variable["name"] for variable in container(name).get("env", [])}


@pytest.mark.parametrize(("name", "routes"), [("engine", ENGINE_ROUTES), ("gateway", GATEWAY_ROUTES)])
def test_probes_ask_routes_that_are_there(name: str, routes: Any):
    ports = {port["name"] for port in container(name)["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        [asked] = [how for key, how in container(name)[probe].items() if key in ("httpGet", "tcpSocket")]
        assert asked["port"] in ports
        if "path" in asked:
            assert ("GET", asked["path"]) in {(route.method, route.path) for route in routes}
    [service] = the("Service", name)["spec"]["ports"]
    assert service.get("targetPort", "http") in ports


def test_streams_may_end_before_they_are_killed():
    drain = next(float(a.split("=")[1]) for a in container("engine")["args"] if a.startswith("--drain-seconds="))
    assert PODS["engine"]["terminationGracePeriodSeconds"] > drain + LAST_WORDS_S
    shutdown = next(field.default for field in fields(Settings) if field.name == "shutdown_seconds")
    before = container("gateway")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert PODS["gateway"]["terminationGracePeriodSeconds"] > before + shutdown + FLUSH_SECONDS


@pytest.mark.parametrize("name", PODS)
def test_nothing_runs_as_root_or_writes_into_its_image(name: str):
    pod, security = PODS[name]["securityContext"], container(name)["securityContext"]
    assert (pod["runAsNonRoot"], pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert f"--uid {pod['runAsUser']} " in (ROOT / "deploy/Dockerfile").read_text()
    assert security == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert PODS[name]["automountServiceAccountToken"] is False
    resources = container(name)["resources"]
    assert resources["requests"].keys() == {"cpu", "memory"}
    assert "memory" in resources["limits"]


@pytest.mark.parametrize("name", PODS)
def test_what_is_mounted_is_there(name: str):
    claims = {made["metadata"]["name"] for made in OBJECTS if made["kind"] == "PersistentVolumeClaim"}
    volumes = {volume["name"] for volume in PODS[name]["volumes"]}
    for volume in PODS[name]["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
    if name != "migrate":
        volumes |= {made["metadata"]["name"] for made in the("StatefulSet", name)["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container(name)["volumeMounts"]} == volumes
    # The folders that the image's own user may write to, and /tmp.
    [owned] = re.findall(r"install -d -o loraplex (.*)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    written = {mount["mountPath"] for mount in container(name)["volumeMounts"] if not mount.get("readOnly")}
    assert written <= {*owned.split(), "/tmp"}


def test_the_claim_of_the_model_binds_only_to_the_volume_of_the_readme():
    [text] = re.findall(r"```yaml\n(apiVersion: v1\nkind: PersistentVolume\n.*?)```", README, re.DOTALL)
    volume, claim = yaml.safe_load(text), the("PersistentVolumeClaim", "model")["spec"]
    assert volume["metadata"]["name"] == claim["volumeName"]
    # A claim without this field gets the cluster's default class, which would make an empty volume.
    assert volume["spec"]["storageClassName"] == claim["storageClassName"] == ""
    assert volume["spec"]["accessModes"] == claim["accessModes"] == ["ReadOnlyMany"]
    assert volume["spec"]["capacity"] == claim["resources"]["requests"]
    mounted = [(name, each) for name in PODS for each in PODS[name]["volumes"] if each["name"] == "model"]
    assert [name for name, _ in mounted] == ["engine", "gateway"]
    assert all(each["persistentVolumeClaim"]["readOnly"] for _, each in mounted)


@pytest.mark.parametrize("name", ["engine", "gateway"])
def test_each_may_lose_one_at_a_time_and_grows_by_what_is_measured(name: str):
    assert the("PodDisruptionBudget", name)["spec"] == {
        "maxUnavailable": 1,
        "selector": {"matchLabels": {"app": name}},
    }
    stateful = the("StatefulSet", name)
    # The service that names the pods has no address of its own.
    assert the("Service", stateful["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
    assert stateful["spec"]["template"]["metadata"]["labels"] == {"app": name}
    scaler = the("HorizontalPodAutoscaler", name)["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
    assert scaler["minReplicas"] == stateful["spec"]["replicas"] < scaler["maxReplicas"]
    [metric] = scaler["metrics"]
    if metric["type"] == "External":
        named = {family.name for family in Metrics().registry.collect()}
        assert metric["external"]["metric"]["name"] in named
