"""The Prometheus rules and the Grafana dashboard that the package ships, checked by promtool."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pgqueue import schema

MONITORING = Path(schema.__file__).parent / "monitoring"
HERE = Path(__file__).parent

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)


def run_promtool(*args: object) -> str:
    done = subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())
    return made


@promtool
def test_the_rules_are_rules() -> None:
    assert "SUCCESS" in run_promtool("check", "rules", MONITORING / "rules.yml")
    assert "SUCCESS" in run_promtool("check", "config", "--syntax-only", MONITORING / "prometheus.yml")


@promtool
def test_alerts_begin_and_end_when_they_should() -> None:
    assert "SUCCESS" in run_promtool("test", "rules", HERE / "rules.test.yml")


def test_every_alert_has_a_test() -> None:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    tested = set(re.findall(r'alertname="(\w+)"', (HERE / "rules.test.yml").read_text()))
    assert alerts == tested


@promtool
def test_every_expression_of_the_dashboard_is_one(tmp_path: Path) -> None:
    made = dashboard()
    expressions = [target["expr"] for panel in made["panels"] for target in panel["targets"]]
    expressions += [annotation["expr"] for annotation in made["annotations"]["list"]]
    assert len(expressions) > 20
    rules = [
        {"record": f"e:{number}", "expr": expression.replace("$__rate_interval", "1m").replace("$queue", ".*")}
        for number, expression in enumerate(expressions)
    ]
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run_promtool("check", "rules", "--lint=none", tmp_path / "dashboard.yml")


def test_panels_have_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
