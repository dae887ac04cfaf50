// An agent on Vercel's AI SDK, run where it is installed: `node ai_sdk_agent.mjs BASE_URL API_KEY`; prints JSON: what the
// model said last in each talk, whole and as a stream, by chat completions and by responses, and a structured answer.
import { createRequire } from "node:module";
const require = createRequire(process.env.NODE_PATH + "/");
const { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");

const [baseURL, apiKey] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey });
const inputSchema = jsonSchema({ type: "object", properties: { a: { type: "string" } }, required: ["a"] });
const run = tool({ description: "Runs a command.", inputSchema, execute: async ({ a }) => `out ${a}` });
const answer = jsonSchema({ type: "object", properties: { number: { type: "number" } }, required: ["number"] });
const report = {};

for (const [name, model] of Object.entries({ chat: openai.chat("m"), responses: openai("m") })) {
  const options = (way) => ({ model, tools: { run }, stopWhen: stepCountIs(8), prompt: `count to four ${name} ${way}` });
  report[`${name} whole`] = (await generateText(options("whole"))).text;
  report[`${name} stream`] = await streamText(options("stream")).text;
  report[`${name} json`] = (await generateObject({ model, schema: answer, prompt: `${name}: say it as JSON` })).object;
}
console.log(JSON.stringify(report));
