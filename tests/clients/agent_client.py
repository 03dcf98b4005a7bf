"""Agents of the libraries that people build them with, as others ask of them: see `asked`.

Each asks which of two cities is warmer, runs the tool that the model calls, and goes on until there is an answer. What
a model is told and what it says is the script of `test_agents.py`. A library is imported by who uses it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from asked import TIMEOUT_S, Told, answer_asked, checked
from weather import AT_ONCE, DESCRIPTION, MOST_TURNS, NAME, PARAMETERS, QUESTION, Weather

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

TOOL: Any = {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}

OTHER_SERVERS = ("reasoning_content", "stop_reason", "provider_specific_fields")
"""Fields of a chat's answers that OpenAI's client does not know; the last is one of LiteLLM's proxy."""


def loop(question: str, ask: Any) -> Told:
    """Asks with all messages so far until there is an answer. `ask` returns a message with OpenAI's fields."""
    weather, messages = Weather(), [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        message = ask(messages)
        if not message.tool_calls:
            return weather.told(message.content)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = weather.of(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return weather.told(None)


def _openai(base_url: str, model: str, question: str, *, is_streamed: bool) -> Told:
    import openai

    options: Any = {"timeout": TIMEOUT_S, "max_retries": 0, "_strict_response_validation": True}
    with openai.OpenAI(base_url=base_url, api_key="none", **options) as api:

        def ask(messages: Any) -> Any:
            given: Any = {"model": model, "messages": messages, "tools": [TOOL]}
            if not is_streamed:
                return checked(api.chat.completions.create(**given), OTHER_SERVERS).choices[0].message
            with api.chat.completions.stream(**given) as stream:
                for event in stream:
                    if event.type == "chunk":
                        checked(event.chunk, OTHER_SERVERS)
                return stream.get_final_completion().choices[0].message

        return loop(question, ask)


def openai_chat(base_url: str, model: str) -> Told:
    return _openai(base_url, model, QUESTION, is_streamed=False)


def openai_stream(base_url: str, model: str) -> Told:
    return _openai(base_url, model, QUESTION, is_streamed=True)


def openai_parallel(base_url: str, model: str) -> Told:
    return _openai(base_url, model, AT_ONCE, is_streamed=False)


def openai_parallel_stream(base_url: str, model: str) -> Told:
    return _openai(base_url, model, AT_ONCE, is_streamed=True)


def _litellm(base_url: str, model: str, *, is_streamed: bool) -> Told:
    import litellm

    def ask(messages: Any) -> Any:
        given: Any = {"messages": messages, "tools": [TOOL], "api_key": "none", "timeout": TIMEOUT_S, "max_retries": 0}
        answer: Any = litellm.completion(model=f"openai/{model}", api_base=base_url, stream=is_streamed, **given)
        whole = litellm.stream_chunk_builder(list(answer)) if is_streamed else answer
        return whole.choices[0].message

    return loop(QUESTION, ask)


def litellm_chat(base_url: str, model: str) -> Told:
    return _litellm(base_url, model, is_streamed=False)


def litellm_stream(base_url: str, model: str) -> Told:
    return _litellm(base_url, model, is_streamed=True)


def _agents(base_url: str, model: str, *, speaks_responses: bool = False) -> tuple[Any, Weather]:
    import agents
    import openai

    weather = Weather()
    agents.set_tracing_disabled(True)
    api = openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=TIMEOUT_S, max_retries=0)
    tool = agents.function_tool(weather.of, name_override=NAME)
    kind = agents.OpenAIResponsesModel if speaks_responses else agents.OpenAIChatCompletionsModel
    spoken = kind(model=model, openai_client=api)
    return agents.Agent(name="Meteorologist", instructions="Be brief.", model=spoken, tools=[tool]), weather


async def openai_agents(base_url: str, model: str) -> Told:
    import agents

    agent, weather = _agents(base_url, model)
    return weather.told((await agents.Runner.run(agent, QUESTION, max_turns=MOST_TURNS)).final_output)


async def openai_agents_stream(base_url: str, model: str) -> Told:
    return await _agents_streamed(*_agents(base_url, model))


async def openai_agents_responses(base_url: str, model: str) -> Told:
    return await _agents_streamed(*_agents(base_url, model, speaks_responses=True))


async def _agents_streamed(agent: Any, weather: Weather) -> Told:
    import agents

    result = agents.Runner.run_streamed(agent, QUESTION, max_turns=MOST_TURNS)
    async for _ in result.stream_events():
        pass
    return weather.told(result.final_output)


def _langgraph(base_url: str, model: str, **more: Any) -> tuple[Any, Weather]:
    from langchain.agents import create_agent
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    weather = Weather()
    given: Any = {"base_url": base_url, "api_key": "none", "timeout": TIMEOUT_S, "max_retries": 0}
    tool = StructuredTool.from_function(weather.of, name=NAME, description=DESCRIPTION)
    return create_agent(ChatOpenAI(model=model, **given, **more), [tool]), weather


def langgraph(base_url: str, model: str) -> Told:
    agent, weather = _langgraph(base_url, model)
    return weather.told(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)


def langgraph_responses(base_url: str, model: str) -> Told:
    agent, weather = _langgraph(base_url, model, use_responses_api=True)
    return weather.told(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text)


def langgraph_stream(base_url: str, model: str) -> Told:
    agent, weather = _langgraph(base_url, model)
    parts = agent.stream({"messages": [("user", QUESTION)]}, stream_mode="messages")
    said = [(part.id, part.content) for part, where in parts if where["langgraph_node"] == "model"]
    return weather.told("".join(text for number, text in said if number == said[-1][0]))


def langchain(base_url: str, model: str) -> Told:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    weather, messages = Weather(), [HumanMessage(QUESTION)]
    given: Any = {"base_url": base_url, "api_key": "none", "timeout": TIMEOUT_S, "max_retries": 0}
    chat = ChatOpenAI(model=model, **given).bind_tools([TOOL])
    for _ in range(MOST_TURNS):
        message: Any = chat.invoke(messages)
        if not message.tool_calls:
            return weather.told(message.content)
        results = [ToolMessage(weather.of(**call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
        messages += [message, *results]
    return weather.told(None)


def _pydantic_ai(base_url: str, model: str, *, speaks_responses: bool = False) -> tuple[Any, Weather]:
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    weather = Weather()
    kind = OpenAIResponsesModel if speaks_responses else OpenAIChatModel
    spoken = kind(model, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    return Agent(spoken, tools=[Tool(weather.of, name=NAME, takes_ctx=False)]), weather


async def pydantic_ai(base_url: str, model: str) -> Told:
    agent, weather = _pydantic_ai(base_url, model)
    return weather.told((await agent.run(QUESTION)).output)


async def pydantic_ai_responses(base_url: str, model: str) -> Told:
    agent, weather = _pydantic_ai(base_url, model, speaks_responses=True)
    return weather.told((await agent.run(QUESTION)).output)


async def pydantic_ai_stream(base_url: str, model: str) -> Told:
    agent, weather = _pydantic_ai(base_url, model)

    async def read(context: Any, events: Any) -> None:
        async for _ in events:
            pass

    return weather.told((await agent.run(QUESTION, event_stream_handler=read)).output)


def instructor(base_url: str, model: str) -> Told:
    """Asks for an object, and again where a validator does not take it: two calls that are forced."""
    import instructor
    import openai
    from pydantic import BaseModel, field_validator

    weather = Weather()

    class Warmest(BaseModel):
        """The warmer city."""

        city: str

        @field_validator("city")
        @classmethod
        def is_a_name(cls, city: str) -> str:
            weather.cities.append(city)
            if not city.istitle():
                raise ValueError("a name begins with a capital")
            return city

    with openai.OpenAI(base_url=base_url, api_key="none", timeout=TIMEOUT_S, max_retries=0) as api:
        client = instructor.from_openai(api, mode=instructor.Mode.TOOLS)
        messages: Any = [{"role": "user", "content": f"As an object: {QUESTION}"}]
        found = client.chat.completions.create(model=model, response_model=Warmest, messages=messages, max_retries=2)
    return weather.told(found.city)


if __name__ == "__main__":
    answer_asked(
        *(openai_chat, openai_stream, openai_parallel, openai_parallel_stream, litellm_chat, litellm_stream),
        *(openai_agents, openai_agents_stream, openai_agents_responses),
        *(langchain, langgraph, langgraph_stream, langgraph_responses),
        *(pydantic_ai, pydantic_ai_stream, pydantic_ai_responses, instructor),
    )
