"""Schemathesis at the HTTP API of a running cluster, by what its /openapi.json says: `make test-schema`.

It makes up calls, good ones and bad ones, one alone and several that build on each other, for SECONDS, and every answer
must be what the document says: its status, its content type, its headers, each field of its body. None may be a 5xx.
Two things are added to the document before, so that calls get past the first check: what may be said for the served
model, and the ids of files and of a batch that are there. Schemathesis has an environment of its own, .venv-schema.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import openai
from cluster_fixture import BUNDLED_MODEL, PlainCluster
from nursery import close_nursery
from workers import ROOT

SCHEMATHESIS = ROOT / ".venv-schema" / "bin" / "schemathesis"
MODEL = BUNDLED_MODEL.name
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
)
"""Not positive_data_acceptance: `router.api.validate` and the chat template refuse more than JSON Schema can say."""
HOOKS = """\
import schemathesis

@schemathesis.hook
def filter_case(context, case):
    is_multipart = case.media_type == "multipart/form-data" and isinstance(case.body, dict)
    return not is_multipart or all(part not in (None, [], {}) for part in case.body.values())
"""
"""A part of a multipart body with nothing in it is not sent, so nobody can refuse it."""
MAX_MODEL_LEN, QUEUE_TIMEOUT_S = 256, 20.0
"""Many outputs of one call, or others in the background, as long as the model allows, must not outlast its time-out."""
MESSAGES = [{"role": "user", "content": "Good morrow."}]
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "plain": {"model": MODEL, "prompt": ["ROMEO:", "JULIET:"], "max_tokens": 8, "n": 2, "logprobs": 2},
        "streamed": {"model": MODEL, "prompt": [5, 6], "max_tokens": 8, "stream": True, "seed": 3},
        "constrained": {"model": MODEL, "prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}},
    },
    "/v1/chat/completions": {
        "plain": {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "logprobs": True, "top_logprobs": 2},
        "streamed": {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "stream": True},
        "stopped": {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "stop": ["\n", "e"], "temperature": 0},
    },
    "/v1/responses": {
        "plain": {"model": MODEL, "input": "Good morrow.", "max_output_tokens": 8, "top_logprobs": 1},
        "streamed": {"model": MODEL, "input": MESSAGES, "max_output_tokens": 8, "stream": True},
        "in the background": {"model": MODEL, "input": "Good morrow.", "max_output_tokens": 8, "background": True},
    },
    "/v1/messages": {
        "plain": {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "system": "Be kind.", "stop_sequences": ["e"]},
        "streamed": {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "stream": True},
    },
    "/v1/messages/count_tokens": {"plain": {"model": MODEL, "messages": MESSAGES}},
    "/tokenize": {"chat": {"model": MODEL, "messages": MESSAGES}, "text": {"prompt": "Good morrow."}},
    "/detokenize": {"tokens": {"model": MODEL, "tokens": [5, 6, 7]}},
}


def document(base: str, input_file_id: str, **ids: str) -> dict[str, Any]:
    """What the router tells, with values that are good here."""
    with urllib.request.urlopen(f"{base}/openapi.json", timeout=60) as page:
        spec: dict[str, Any] = json.load(page)
    good = {"model": MODEL, **ids}
    asked = (
        "ChatBody",
        "CompletionBody",
        "ResponseBody",
        "MessagesBody",
        "CountBody",
        "TokenizeBody",
        "DetokenizeBody",
    )
    for name in asked:
        spec["components"]["schemas"][name]["properties"]["model"] = {"enum": [MODEL, ""]}
    spec["components"]["schemas"]["BatchBody"]["properties"]["input_file_id"] = {"enum": [input_file_id]}
    for path, methods in spec["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    parameter["example"] = good[parameter["name"]]
        if path in EXAMPLES:
            examples = {name: {"value": value} for name, value in EXAMPLES[path].items()}
            methods["post"]["requestBody"]["content"]["application/json"]["examples"] = examples
    return spec


def begin(base: str) -> dict[str, str]:
    """Ids of a file for batches, of one that may be deleted, of a batch, and of a response."""
    body = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 4}
    line = json.dumps({"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}).encode()
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=60) as client:
        file, other = (client.files.create(file=("lines.jsonl", line), purpose="batch") for _ in range(2))
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        response = client.responses.create(model=MODEL, input="Good morrow.", max_output_tokens=8)
    return {"input_file_id": file.id, "file_id": other.id, "batch_id": batch.id, "response_id": response.id}


def try_all(seconds: str, more: list[str], folder: Path) -> int:
    """Schemathesis' exit code."""
    router = {"http_port": 0, "queue_timeout_s": QUEUE_TIMEOUT_S}
    with PlainCluster(BUNDLED_MODEL, folder, router=router, max_model_len=MAX_MODEL_LEN) as cluster:
        base = f"http://{cluster.http_address}"
        file = folder / "openapi.json"
        file.write_text(json.dumps(document(base, **begin(base))), encoding="utf-8")
        hooks = folder / "hooks.py"
        hooks.write_text(HOOKS, encoding="utf-8")
        given = ["--url", base, "--max-time", seconds, "--checks", ",".join(CHECKS), "--request-timeout", "180"]
        quiet = ["--continue-on-failure", "--suppress-health-check", "all", "--generation-database", "none"]
        command = [SCHEMATHESIS, "run", file, *given, *quiet, *more]
        environment = os.environ | {"SCHEMATHESIS_HOOKS": str(hooks)}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    """`arguments`: more for Schemathesis."""
    if not SCHEMATHESIS.exists():
        print(f"error: {SCHEMATHESIS} is not there; `make test-schema` installs it", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            return try_all(os.environ.get("SECONDS", "600"), arguments, Path(folder))
    finally:
        close_nursery()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
