"""The OpenAPI document: complete, honest (schemathesis), and readable without a network."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Api, MakeLive

HERE = Path(__file__).parent
ROUTES = """
POST /jobs · POST /jobs/batch · GET /jobs · GET /jobs/{} · GET /jobs/{}/result · POST /jobs/{}/cancel ·
DELETE /jobs/{} · GET /jobs/{}/events · GET /events · POST /admin/jobs/{}/retry · GET /admin/dlq ·
POST /admin/dlq/retry-all · POST /admin/dlq/discard-all · GET /queues · GET /queues/{} · POST /admin/queues/{}/pause ·
POST /admin/queues/{}/resume · PATCH /admin/queues/{} · GET /schedules/{} · PUT /schedules/{} · DELETE /schedules/{} ·
POST /admin/schedules/{}/run · GET /schedules/{}/preview · GET /workers · GET /stats · POST /leases/claim ·
POST /leases/heartbeat · POST /leases/complete · POST /leases/fail · POST /leases/release · GET /health/live ·
GET /health/ready
"""


def test_every_route_of_the_contract_is_described(api: Api) -> None:
    document = api.get("/schema/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    described = {
        f"{method.upper()} {re.sub(r'{[^}]*}', '{}', path)}"
        for path, item in document["paths"].items()
        for method in item
        if method in ("get", "post", "put", "patch", "delete")
    }
    wanted = {" ".join(route.split()) for route in ROUTES.split("·")}
    assert wanted - described == set()


def test_every_operation_is_described_whole(api: Api) -> None:
    document = api.get("/schema/openapi.json").json()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"], (method, path)
            problems = {status for status in operation["responses"] if status >= "400"}
            assert {"422", "500", "503"} <= problems, (method, path)
            for status in problems - {"503"}:
                assert "application/problem+json" in operation["responses"][status]["content"], (method, path, status)
            if "requestBody" in operation:
                assert {"400", "413", "415"} <= problems
            if operation.get("security"):
                assert {"401", "403", "429"} <= problems
    # References lead somewhere.
    text = str(document)
    for name in set(re.findall(r"#/components/schemas/(\w+)", text)):
        assert name in document["components"]["schemas"], name
    example = document["paths"]["/jobs"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert api.post("/jobs", json=example).status_code == 201


def test_the_page_needs_nothing_from_elsewhere(api: Api) -> None:
    page = api.get("/schema")
    assert page.headers["content-type"].startswith("text/html")
    assert "script" not in page.text.lower().replace("description", "")
    assert not re.findall(r"""(?:src|href)=["'](?!#|schema/openapi\.json)""", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "/jobs/batch" in page.text
    root = api.get("/", follow_redirects=False)
    assert root.status_code == 307


def test_the_document_says_whether_a_key_is_needed(api: Api) -> None:
    def security() -> Any:
        return api.get("/schema/openapi.json").json()["paths"]["/jobs"]["get"]["security"]

    assert {} in security()
    api.post("/admin/keys", json={"name": "k", "scopes": ["admin"]})
    assert security() == [{"key": []}]


# A run of all phases takes minutes; CI looks at enough of it to catch what is plainly wrong.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_schemathesis_finds_nothing(live: MakeLive, tmp_path: Path, examples: int) -> None:
    api = live(maintenance=True)
    key = api.http.post("/admin/keys", json={"name": "st", "scopes": ["admin"]}).json()["key"]
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"),
            "run", f"{api.url}/schema/openapi.json", "--checks", "all",
            "--max-examples", str(examples), "--workers", "2",
            # The same each time where it is to catch what is plainly wrong. Another may find that ?queue=a is no array.
            *(["--seed", "3"] if examples < 10 else []),
            "--header", f"Authorization: Bearer {key}",
            # Streams do not end; test_events has them.
            "--exclude-path-regex", "events$",
        ],
        env={"PATH": "/usr/bin:/bin", "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert "500" not in {line.strip()[1:4] for line in done.stdout.splitlines() if line.startswith("[5")}
