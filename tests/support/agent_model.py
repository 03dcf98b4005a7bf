"""A model folder without weights whose chat template has tools and thinking, for scripts that use them
(docs/timed.md)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cluster_fixture import BUNDLED_MODEL

TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write a call as <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def call(name: str, **arguments: str) -> str:
    """The text with which the model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_model(folder: Path, max_model_len: int = 65536) -> Path:
    """The bundled model's tokenizer with a template that knows both, and room for long conversations; no weights."""
    folder.mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    for name, more in (
        ("config.json", {"max_position_embeddings": max_model_len}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE, "model_max_length": max_model_len}),
    ):
        (folder / name).write_text(json.dumps({**json.loads((BUNDLED_MODEL / name).read_text()), **more}))
    return folder
