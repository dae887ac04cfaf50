"""Frameworks for agents, as published: ``frameworks.py NAME BASE_URL API_KEY``; prints JSON.

Each talks twice, whole and as a stream where it can, calls the tool ``run`` four times in each talk and answers then;
and asks for structured output once where it has that. Run by an interpreter that has them (``make test-clients``).
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

NAME, BASE_URL, KEY = sys.argv[1:4]
os.environ |= {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": KEY}
TASK, JSON_TASK = "count to four", "say it as JSON"
INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


def run(a: str) -> str:
    """Runs a command.

    Args:
        a: the command.
    """
    return f"out {a}"


async def openai_agents() -> dict[str, Any]:
    from agents import Agent, Runner, function_tool, set_tracing_disabled
    from pydantic import BaseModel

    class Answer(BaseModel):
        number: int

    set_tracing_disabled(True)
    agent = Agent(name="counter", model="m", tools=[function_tool(run)])
    whole = await Runner.run(agent, f"{TASK} whole")
    stream = Runner.run_streamed(agent, f"{TASK} stream")
    async for _ in stream.stream_events():
        pass
    told = await Runner.run(Agent(name="teller", model="m", output_type=Answer), JSON_TASK)
    return {"whole": whole.final_output, "stream": stream.final_output, "json": told.final_output.number}


async def pydantic_ai() -> dict[str, Any]:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel

    class Answer(BaseModel):
        number: int

    async def listen(_: object, events: Any) -> None:
        async for _ in events:
            pass

    agent = Agent(OpenAIChatModel("m"), tools=[run])
    whole = await agent.run(f"{TASK} whole")
    streamed = await agent.run(f"{TASK} stream", event_stream_handler=listen)
    told = await Agent(OpenAIChatModel("m"), output_type=NativeOutput(Answer)).run(JSON_TASK)
    return {"whole": whole.output, "stream": streamed.output, "json": told.output.number}


async def langchain() -> dict[str, Any]:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        number: int

    agent = create_agent(ChatOpenAI(model="m"), tools=[run], name="counter")
    whole = await agent.ainvoke({"messages": [("user", f"{TASK} whole")]})
    last: Any = None
    async for state in create_agent(ChatOpenAI(model="m", streaming=True), tools=[run]).astream(
        {"messages": [("user", f"{TASK} stream")]}, stream_mode="values"
    ):
        last = state
    told = await ChatOpenAI(model="m").with_structured_output(Answer).ainvoke(JSON_TASK)
    return {"whole": whole["messages"][-1].content, "stream": last["messages"][-1].content, "json": told.number}


async def smolagents() -> dict[str, Any]:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id="m", api_base=BASE_URL, api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(run)], model=model, max_steps=8, verbosity_level=0)
    said = await asyncio.to_thread(agent.run, f"{TASK} whole")
    streaming = ToolCallingAgent(tools=[tool(run)], model=model, max_steps=8, verbosity_level=0, stream_outputs=True)
    streamed = await asyncio.to_thread(streaming.run, f"{TASK} stream")
    return {"whole": said, "stream": streamed}


async def smolagents_code() -> dict[str, Any]:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    model = OpenAIServerModel(model_id="m", api_base=BASE_URL, api_key=KEY)
    agent = CodeAgent(tools=[tool(run)], model=model, max_steps=8, verbosity_level=0)
    said = await asyncio.to_thread(agent.run, f"{TASK} whole")
    streaming = CodeAgent(tools=[tool(run)], model=model, max_steps=8, verbosity_level=0, stream_outputs=True)
    return {"whole": said, "stream": await asyncio.to_thread(streaming.run, f"{TASK} stream")}


async def crewai() -> dict[str, Any]:
    from crewai import LLM, Agent
    from crewai.tools import tool
    from pydantic import BaseModel

    class Answer(BaseModel):
        number: int

    def agent(*, tools: list[Any], stream: bool = False) -> Any:
        llm = LLM(model="openai/m", base_url=BASE_URL, api_key=KEY, stream=stream)
        return Agent(role="counter", goal="count", backstory="You count.", tools=tools, llm=llm)

    tools = [tool(run)]
    whole = await asyncio.to_thread(agent(tools=tools).kickoff, f"{TASK} whole")
    streamed = await asyncio.to_thread(agent(tools=tools, stream=True).kickoff, f"{TASK} stream")
    told = await asyncio.to_thread(agent(tools=[]).kickoff, JSON_TASK, response_format=Answer)
    return {"whole": whole.raw, "stream": streamed.raw, "json": told.pydantic.number}


async def autogen() -> dict[str, Any]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    said = {}
    for way in ("whole", "stream"):
        client = OpenAIChatCompletionClient(model="m", base_url=BASE_URL, api_key=KEY, model_info=INFO)
        agent = AssistantAgent(
            "counter", client, tools=[run], max_tool_iterations=8, model_client_stream=way == "stream"
        )
        said[way] = (await agent.run(task=f"{TASK} {way}")).messages[-1].content
        await client.close()
    return said


async def dspy() -> dict[str, Any]:
    import dspy

    dspy.configure(lm=dspy.LM("openai/m", api_base=BASE_URL, api_key=KEY, cache=False))
    agent = dspy.ReAct("question -> answer", tools=[run], max_iters=6)
    return {"whole": (await asyncio.to_thread(agent, question=TASK)).answer}


async def instructor() -> dict[str, Any]:
    import instructor
    from pydantic import BaseModel

    class Answer(BaseModel):
        number: int

    client = instructor.from_provider("openai/m", base_url=BASE_URL, api_key=KEY, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": JSON_TASK}]
    told = client.create(response_model=Answer, messages=messages)
    parts = list(client.create_partial(response_model=Answer, messages=[{"role": "user", "content": f"{JSON_TASK}!"}]))
    return {"json": told.number, "stream": parts[-1].number}


async def llama_index() -> dict[str, Any]:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    said = {}
    for way in ("whole", "stream"):
        llm = OpenAILike(model="m", api_base=BASE_URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True)
        agent = FunctionAgent(tools=[run], llm=llm, streaming=way == "stream")
        said[way] = str(await agent.run(f"{TASK} {way}"))
    return said


FRAMEWORKS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        *(openai_agents, pydantic_ai, langchain, smolagents, smolagents_code),
        *(autogen, crewai, dspy, instructor, llama_index),
    )
}
sys.stdout.write("\n" + json.dumps(asyncio.run(FRAMEWORKS[NAME]())) + "\n")
