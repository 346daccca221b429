"use strict";
// Server-sent events out of a body.

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
