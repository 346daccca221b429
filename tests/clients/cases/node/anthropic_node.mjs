// The official `@anthropic-ai/sdk` package: messages, streams, tools, counted tokens.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "test-model";
const messages = [{ role: "user", content: "hi" }];
const tools = [{ name: "weather", input_schema: { type: "object", properties: { city: { type: "string" } } } }];

const whole = await client.messages.create({ model, max_tokens: 200, messages });
assert.match(whole.content[0].text, /42/);
const stream = client.messages.stream({ model, max_tokens: 200, messages, tools });
const called = await stream.finalMessage();
assert.deepEqual(called.content.at(-1).input, { city: "Paris" });
const more = [...messages, { role: "assistant", content: called.content },
  { role: "user", content: [{ type: "tool_result", tool_use_id: called.content.at(-1).id, content: "rain" }] }];
assert.match((await client.messages.create({ model, max_tokens: 200, messages: more, tools })).content[0].text, /42/);
assert.ok((await client.messages.countTokens({ model, messages: more, tools })).input_tokens > 10);
