"""JSON as clients send it, in bodies and in the lines of batches. Pure."""

from __future__ import annotations

import json


def read_json(data: bytes) -> object:
    """Raises ValueError for what is not JSON in UTF-8."""
    text = data.decode("utf-8")
    try:
        found = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text
    except RecursionError as error:
        raise ValueError("nests too deep") from error
    return found
