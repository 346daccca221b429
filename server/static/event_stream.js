"use strict";
// Server-sent events out of a body, and which tokens of an event were drafted.

// Cuts text that comes in any pieces into the data of whole events; comments carry none.
class EventSplitter {
  constructor() {
    this.rest = "";
  }

  // The data of each event that `text` completes.
  push(text) {
    const blocks = (this.rest + text).split(/\r?\n\r?\n/);
    this.rest = blocks.pop();
    return blocks.map(dataOf).filter((data) => data !== "");
  }
}

function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

// Every event of a reply's body up to [DONE]. Throws when the body ends without it.
async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const splitter = new EventSplitter();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The connection ended before the reply was complete.");
      for (const data of splitter.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// A chunk's text as [{text, drafted, probability}], in order.
//
// A step commits the drafts it accepted and then one token of its own, and sends them as one chunk: all but
// the last were drafted. Steps that a slow reader made the server merge cannot be told apart here; the count
// in the reply's own account can, and is shown beside.
function splitChunk(choice) {
  const text = choice.delta?.content ?? "";
  const tokens = choice.logprobs?.content ?? [];
  const count = choice.token_ids?.length ?? tokens.length;
  if (count < 2) return [{ text, drafted: false, probability: probabilityOf(tokens[0]) }];
  const pieces = alignTokens(text, tokens);
  if (pieces !== null) return pieces.map((piece, i) => ({ ...piece, drafted: i < count - 1 }));
  const last = tokens.at(-1)?.token ?? "";
  const end = last !== "" && text.endsWith(last) ? text.length - last.length : text.length;
  const rest = { text: text.slice(0, end), drafted: true, probability: null };
  return [rest, { text: text.slice(end), drafted: false, probability: probabilityOf(tokens.at(-1)) }];
}

// One piece a token, null when the tokens do not spell the text (half characters, text held back).
function alignTokens(text, tokens) {
  let at = 0;
  const pieces = [];
  for (const token of tokens) {
    const shown = text.startsWith(token.token, at) ? token.token : "";
    if (shown === "" && at < text.length) return null;
    pieces.push({ text: shown, probability: probabilityOf(token) });
    at += shown.length;
  }
  return at === text.length && pieces.length > 0 ? pieces : null;
}

function probabilityOf(token) {
  return token === undefined ? null : Math.exp(token.logprob);
}
