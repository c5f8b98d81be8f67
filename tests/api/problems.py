"""What answers with problems must be."""

from typing import Any


def problem(response: Any, status: int, kind: str) -> dict[str, Any]:
    """The problem of a response that must be one."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:pgqueue:problem:{kind}", body
    assert body["status"] == status
    assert body["request_id"] == response.headers["x-request-id"]
    assert body["title"]
    assert body["detail"]
    return body
