"use strict";
// Which token each piece of a reply's text came from.

const MOST_WAITING = 4096; // tokens of which nothing was shown

// The tokens of one reply, as the stream brings them. The server shows less than they spell: marks around
// reasoning and calls are left out, and what may yet become a mark comes later than its tokens.
class TokenTrail {
  constructor() {
    // It holds the bytes of a character that is not complete.
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.waiting = [];
  }

  // Take the tokens of a chunk; {count, drafted} says how many they are, and how many of them were drafted.
  add(choice) {
    const origins = choice.token_origins ?? [];
    const scores = choice.logprobs?.content ?? [];
    origins.forEach((origin, i) => {
      const { bytes, logprob } = scores[i] ?? {};
      const text = this.decoder.decode(new Uint8Array(bytes ?? []), { stream: true });
      const probability = logprob === undefined ? null : Math.exp(logprob);
      this.waiting.push({ text, drafted: origin === "draft", probability });
    });
    this.waiting.splice(0, this.waiting.length - MOST_WAITING);
    return { count: origins.length, drafted: origins.filter((origin) => origin === "draft").length };
  }

  // `text`, which is shown now, as [{text, drafted, probability}] in order. `drafted` is null where the tokens
  // do not spell it. It continues what was shown, or is the newest behind a mark.
  take(text) {
    if (text === "") return [];
    const spelt = this.waiting.map((token) => token.text).join("");
    const at = spelt.startsWith(text) ? 0 : spelt.lastIndexOf(text);
    return at < 0 ? [{ text, drafted: null, probability: null }] : this.cut(at, text.length);
  }

  // The `count` characters behind the next `skip`. Both are gone then.
  cut(skip, count) {
    const pieces = [];
    while (count > 0) {
      const token = this.waiting[0];
      const from = Math.min(skip, token.text.length);
      const text = token.text.slice(from, from + count);
      if (text !== "") pieces.push({ ...token, text });
      skip -= from;
      count -= text.length;
      token.text = token.text.slice(from + text.length);
      if (token.text === "") this.waiting.shift();
    }
    return pieces;
  }
}
