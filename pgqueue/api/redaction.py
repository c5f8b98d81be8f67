"""Redaction: values of payloads that lists do not show, by their keys."""

import json
import re
from decimal import Decimal
from typing import Any, Final

import msgspec
from msgspec import Raw

REDACTED: Final = "[redacted]"
# Decimals, so that numbers come out as they went in.
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


def redact(value: Raw, secrets: re.Pattern[str]) -> Raw:
    """Return JSON with the values of keys that match replaced, however deep they lie."""
    text = bytes(value).decode()
    if not secrets.search(text):
        return value
    try:
        parsed = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError):
        # What cannot be read cannot be shown safely.
        return Raw(_encode(REDACTED))
    return Raw(_encode(_redacted(parsed, secrets)))


def _redacted(value: Any, secrets: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: REDACTED if item is not None and secrets.search(key) else _redacted(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted(item, secrets) for item in value]
    return value
