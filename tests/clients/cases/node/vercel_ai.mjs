// Vercel's AI SDK over its providers for chat completions, responses and messages.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "it", baseURL: `${url}/v1` });
const tools = {
  weather: tool({
    description: "of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `rain in ${city}`,
  }),
};
const name = "test-model";
for (const model of [openai.chat(name), openai.responses(name), anthropic(name), compatible(name)]) {
  const { text, steps } = await generateText({ model, prompt: "hi", tools, stopWhen: stepCountIs(4) });
  assert.match(text, /42/);
  assert.equal(steps.length, 2);
  const stream = streamText({ model, prompt: "hi" });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  assert.match(streamed, /42/);
}
