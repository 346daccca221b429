// The official `openai` package for Node: chat, responses, streams, tools.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "hi" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };

const chat = await client.chat.completions.create({ model, messages });
assert.match(chat.choices[0].message.content, /42/);
const chunks = client.chat.completions.stream({ model, messages });
assert.match(await chunks.finalContent(), /42/);
const runner = client.chat.completions.runTools({
  model, messages,
  tools: [{ type: "function", function: { name: "weather", parameters, parse: JSON.parse, function: ({ city }) => `rain in ${city}` } }],
});
assert.match(await runner.finalContent(), /42/);

const first = await client.responses.create({ model, input: "hi", tools: [{ type: "function", name: "weather", parameters, strict: true }] });
const call = first.output[0];
assert.equal(call.type, "function_call");
assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
const last = await client.responses.create({
  model, previous_response_id: first.id, input: [{ type: "function_call_output", call_id: call.call_id, output: "rain" }],
});
assert.match(last.output_text, /42/);
const stream = client.responses.stream({ model, input: "hi" });
assert.match((await stream.finalResponse()).output_text, /42/);
