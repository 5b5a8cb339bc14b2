"""The configurations of docs/deploy.md: YAML that parses, and options that there are."""

from __future__ import annotations

import re
from typing import Any

import yaml
from typer.main import get_command

from foretoken.cli.script import app
from scripts import ROOT

PAGE = (ROOT / "docs" / "deploy.md").read_text()
BLOCKS = [[*yaml.safe_load_all(block)] for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]


def options(command: str) -> set[str]:
    commands: Any = get_command(app)
    return {flag for each in commands.commands[command].params for flag in each.opts}


def test_every_configuration_is_yaml() -> None:
    kinds = [each.get("kind") or next(iter(each)) for block in BLOCKS for each in block]
    assert kinds == ["target", "Deployment", "services", "RayJob", "Service"]


def test_every_option_of_a_command_is_one() -> None:
    text = re.sub(r"&&\s+", "&& ", PAGE)
    calls = re.findall(r"foretoken (serve|generate) ([^\n`\"&\]]*)", text)
    assert len(calls) >= 5
    for command, rest in calls:
        flags = set(re.findall(r"(?<![\w-])--[a-z-]+", rest))
        assert flags <= options(command) | {"--help"}, rest


def test_containers_that_mount_have_the_volume() -> None:
    pods = [each["spec"]["template"]["spec"] for (each,) in BLOCKS[1:2]]
    cluster = BLOCKS[3][0]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods + [group["template"]["spec"] for group in groups]:
        mounted = {each["name"] for c in pod["containers"] for each in c["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["volumes"]}
    labels = cluster["headGroupSpec"]["template"]["metadata"]["labels"]
    service = BLOCKS[3][1]["spec"]
    assert service["selector"].items() <= labels.items()
    (port,) = groups[0]["template"]["spec"]["containers"][0]["ports"]
    assert service["ports"][0]["targetPort"] == port["name"]


def test_processors_are_enough_for_the_replicas() -> None:
    """Replicas times threads, against what the workers say they have."""
    job = BLOCKS[3][0]["spec"]
    replicas, threads = (
        int(re.search(rf"--{n} (\d+)", job["entrypoint"])[1]) for n in ("replicas", "threads")
    )
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert replicas * threads <= group["replicas"] * int(group["rayStartParams"]["num-cpus"])
    assert job["rayClusterSpec"]["rayVersion"] in (ROOT / "constraints.txt").read_text()
