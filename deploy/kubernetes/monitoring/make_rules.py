"""Write prometheusrule.yaml from deploy/alerts.yml: `python deploy/kubernetes/monitoring/make_rules.py`."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES, TARGET = HERE.parent.parent / "alerts.yml", HERE / "prometheusrule.yaml"
HEAD = """\
# Generated from deploy/alerts.yml: `python deploy/kubernetes/monitoring/make_rules.py`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: { name: loraplex }
spec:
"""


def manifest(rules: str) -> str:
    """Return the manifest with the rules of a Prometheus file, in their original form and with their comments."""
    return HEAD + "".join(f"  {line}".rstrip() + "\n" for line in rules.splitlines())


if __name__ == "__main__":
    TARGET.write_text(manifest(RULES.read_text()))
