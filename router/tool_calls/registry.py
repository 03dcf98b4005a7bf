"""The formats that are known, and which of them a model writes."""

from __future__ import annotations

from router.tool_calls.deepseek import DeepSeek
from router.tool_calls.format import ToolFormat
from router.tool_calls.glm import Glm
from router.tool_calls.granite import Granite
from router.tool_calls.harmony import Harmony, HarmonyThinking
from router.tool_calls.hermes import Hermes
from router.tool_calls.invoke_xml import InvokeXml
from router.tool_calls.json_call import PlainJson
from router.tool_calls.kimi import Kimi
from router.tool_calls.llama_json import LlamaJson
from router.tool_calls.mistral import Mistral
from router.tool_calls.pythonic import Lfm2, Pythonic
from router.tool_calls.qwen_xml import QwenXml
from router.tool_calls.thinking import Thinking

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    Harmony(),
    Kimi(),
    DeepSeek("deepseek_v3", is_fenced=True),
    DeepSeek("deepseek_v31", is_fenced=False),
    InvokeXml("deepseek_v32", "function_calls", is_dsml=True),
    InvokeXml("deepseek_v4", "tool_calls", is_dsml=True),
    InvokeXml("minimax_m2", "minimax:tool_call", is_dsml=False),
    Granite(),
    Lfm2(),
    Mistral(),
    Glm(),
    QwenXml("seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
    QwenXml("qwen3_coder", "<tool_call>", "</tool_call>"),
    Hermes(),
    Pythonic(),
    LlamaJson(),
    PlainJson(),
)
"""Asked in this order whether a template is theirs: a later one may know marks of an earlier one."""
THINKING: tuple[Thinking, ...] = (
    HarmonyThinking(),
    Thinking("think", "<think>", "</think>"),
    Thinking("mistral", "[THINK]", "[/THINK]"),
    Thinking("seed", "<seed:think>", "</seed:think>"),
    Thinking("kimi", "◁think▷", "◁/think▷"),
    Thinking("thought", "<thought>", "</thought>"),
    Thinking("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)


def named_format(name: str) -> ToolFormat:
    """The format that `model.tool_format` calls so."""
    return next(each for each in TOOL_FORMATS if each.name == name)


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template writes calls in, by its source; None: it knows no tools."""
    return next((each for each in TOOL_FORMATS if each.is_of(template)), None)


def thinking_of(template: str) -> Thinking | None:
    """How the model of this chat template thinks, by its source; None: it does not."""
    return next((each for each in THINKING if each.is_of(template)), None)
