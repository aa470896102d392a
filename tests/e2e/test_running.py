"""A running `loraplex up`: its data folder is taken, and its secrets are not shown."""

import json
from pathlib import Path

from testing.ports import free_port
from testing.stack import Stack, children, loraplex, one_line_error


def test_a_second_up_on_the_same_data_is_refused(stack: Stack):
    done = loraplex("up", "--demo", "--port", str(free_port()), "--data-dir", str(stack.data))
    assert done.returncode == 1
    assert "another `loraplex up` is running" in one_line_error(done)


def test_secrets_are_in_no_command_line(stack: Stack, demo: dict):
    secrets = {demo["admin_key"], *(t["api_key"] for t in demo["tenants"])}
    secrets |= set(json.loads((stack.data / "secrets.json").read_text()).values())
    pids = [stack.process.pid, *children(stack.process.pid)]
    assert len(pids) == 4
    shown = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
    assert not [secret for secret in secrets if secret in shown]
    for log in (stack.data / "logs").glob("*.log"):
        assert not [secret for secret in secrets if secret in log.read_text()], log
