"""What the outputs of a chat may hold beside text: by its tools, the model's way of calling them, and its thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.pb import generation_pb2 as pb
from router.api.chat import Chat
from router.api.tokenizer import Tokenizer
from router.tool_calls.format import Tool
from router.tool_calls.output import OutputForm
from router.tool_calls.registry import named_format, thinking_of, tool_format_of


class ChatForms:
    """How the served model writes calls and thinking."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "auto") -> None:
        """`tool_format`: the name of a format; auto: as the chat template has it."""
        self._tokenizer = tokenizer
        template = tokenizer.chat_template.source
        self.tool_format = tool_format_of(template) if tool_format == "auto" else named_format(tool_format)
        self.thinking = thinking_of(template)

    @property
    def special_ids(self) -> Mapping[str, int]:
        return self._tokenizer.special_ids

    @property
    def capabilities(self) -> list[str]:
        """What the model can do with a chat, and with a text and its suffix, as `Model.capabilities` names it."""
        is_chat = self._tokenizer.chat_template.is_present
        can = {
            "chat": is_chat,
            "tools": is_chat and self.tool_format is not None,
            "reasoning": self.thinking is not None,
            "fill_in_middle": self._tokenizer.infill is not None,
        }
        return [name for name, is_there in can.items() if is_there]

    def form_of(self, chat: Chat, prompt_token_ids: Sequence[int]) -> OutputForm | None:
        """The form of the outputs; None: they are text."""
        choice, thinking, is_thinking = chat.choice, self.thinking, False
        if thinking is not None:
            end = self._tokenizer.tail(prompt_token_ids).rstrip()
            is_thinking = end.endswith(thinking.begin)
            if end.endswith(thinking.end):
                thinking = None  # the template has ended it before it began
        tools, must_call = {}, choice.mode == pb.ToolChoice.MODE_REQUIRED
        tool_format = self.tool_format or (named_format("json") if must_call else None)
        if tool_format is not None and choice.mode != pb.ToolChoice.MODE_NONE:
            given = (_tool(index, each) for index, each in enumerate(chat.tools))
            tools = {tool.name: tool for tool in given if tool.name in choice.names or not choice.names}
        if thinking is None and not tools:
            return None
        return OutputForm(
            tools,
            tool_format if tools else None,
            must_call=must_call,
            is_single=choice.single or (must_call and len(choice.names) == 1),
            thinking=thinking,
            is_thinking=is_thinking,
            most_thinking_tokens=chat.reasoning.max_tokens if chat.reasoning.HasField("max_tokens") else None,
        )


def _tool(index: int, found: Mapping[str, Mapping[str, object]]) -> Tool:
    function = found["function"]
    parameters = function.get("parameters") or {}
    assert isinstance(parameters, Mapping)
    return Tool(str(function["name"]), parameters, is_strict=function.get("strict") is True, index=index)
