"use strict";
// Server-sent events out of a body, and which tokens of an event were drafted.

const LOST = "The connection was lost before the reply was complete.";

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

function rephraseLoss(error) {
  throw error.name === "AbortError" ? error : new Error(LOST);
}

// Every event of a reply's body up to [DONE]. Throws when the body ends without it.
async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const splitter = new EventSplitter();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(rephraseLoss);
      if (done) throw new Error(LOST);
      for (const data of splitter.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Cuts each chunk of one choice into its tokens.
//
// A step commits the drafts it accepted and then one token of its own, and sends them as one chunk: all but
// the last were drafted. Steps that a slow reader made the server merge cannot be told apart here; the count
// in the reply's own account can, and is shown beside.
class ChunkSplitter {
  constructor() {
    this.decoder = new TextDecoder(); // holds the bytes of a character that is not complete
  }

  // [{text, drafted, probability}] in order; the texts join to the chunk's.
  split(choice) {
    const text = choice.delta?.content ?? "";
    const tokens = choice.logprobs?.content ?? [];
    const count = choice.token_ids?.length ?? tokens.length;
    const texts = this.align(text, tokens);
    if (texts !== null && tokens.length === count) {
      return texts.map((part, i) => piece(part, i < count - 1, tokens[i]));
    }
    if (count < 2) return [piece(text, false, tokens[0])];
    const last = tokens.at(-1)?.token ?? "";
    const end = last !== "" && text.endsWith(last) ? text.length - last.length : text.length;
    return [piece(text.slice(0, end), true), piece(text.slice(end), false, tokens.at(-1))];
  }

  // One text a token, null when their bytes do not spell `text`. The last may be one that is not shown.
  align(text, tokens) {
    const texts = tokens.map(({ bytes }) => this.decoder.decode(new Uint8Array(bytes ?? []), { stream: true }));
    if (texts.join("") === text) return texts;
    this.decoder = new TextDecoder();
    return texts.slice(0, -1).join("") === text ? [...texts.slice(0, -1), ""] : null;
  }
}

function piece(text, drafted, token) {
  return { text, drafted, probability: token === undefined ? null : Math.exp(token.logprob) };
}
