// An agent on the Node SDKs, run where they are installed: `node sdk_agent.mjs BASE_URL API_KEY`; prints JSON,
// for each way to talk what the model said in each of five turns: its text and its calls.
import { createRequire } from "node:module";
const require = createRequire(process.env.NODE_PATH + "/");
const OpenAI = require("openai").default;
const Anthropic = require("@anthropic-ai/sdk").default;

const [baseURL, apiKey] = process.argv.slice(2);
const openai = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const claude = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey, maxRetries: 0 });
const parameters = { type: "object", properties: { a: { type: "string" } } };
const report = {};

async function chat(stream) {
  const tools = [{ type: "function", function: { name: "run", parameters } }];
  const messages = [{ role: "user", content: `hi chat ${stream}` }];
  const said = [];
  for (let turn = 0; turn < 5; turn++) {
    const body = { model: "m", messages, tools };
    const message = stream
      ? await openai.chat.completions.stream(body).finalMessage()
      : (await openai.chat.completions.create(body)).choices[0].message;
    said.push(message);
    messages.push(message);
    for (const call of message.tool_calls ?? []) messages.push({ role: "tool", tool_call_id: call.id, content: "out" });
  }
  const calls = (one) => (one.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  return said.map((one) => [one.content, calls(one)]);
}

async function responses(stream) {
  const tools = [{ type: "function", name: "run", parameters, strict: false }];
  const input = [{ role: "user", content: `hi responses ${stream}` }];
  const said = [];
  for (let turn = 0; turn < 5; turn++) {
    const body = { model: "m", input, tools };
    const response = stream ? await openai.responses.stream(body).finalResponse() : await openai.responses.create(body);
    said.push(response);
    input.push(...response.output);
    for (const item of response.output)
      if (item.type === "function_call") input.push({ type: "function_call_output", call_id: item.call_id, output: "out" });
  }
  const calls = (one) => one.output.filter((item) => item.type === "function_call");
  return said.map((one) => [one.output_text, calls(one).map((call) => [call.name, JSON.parse(call.arguments)])]);
}

async function messages(stream) {
  const tools = [{ name: "run", input_schema: parameters }];
  const turns = [{ role: "user", content: `hi messages ${stream}` }];
  const said = [];
  for (let turn = 0; turn < 5; turn++) {
    const body = { model: "m", max_tokens: 500, messages: turns, tools };
    const message = stream ? await claude.messages.stream(body).finalMessage() : await claude.messages.create(body);
    said.push(message);
    turns.push({ role: "assistant", content: message.content });
    const uses = message.content.filter((block) => block.type === "tool_use");
    turns.push({ role: "user", content: uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: "out" })) });
  }
  const text = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
  const calls = (message) => message.content.filter((block) => block.type === "tool_use");
  return said.map((message) => [text(message), calls(message).map((use) => [use.name, use.input])]);
}

for (const [name, talk] of Object.entries({ chat, responses, messages }))
  for (const stream of [false, true]) report[`${name} ${stream ? "stream" : "whole"}`] = await talk(stream);
console.log(JSON.stringify(report));
