"use strict";
// One reply of a chat: its reasoning, text and calls as they stream, and what it took.

const END_REASONS = { length: "Cut at max tokens.", abort: "Ended by the server." };

// A copy of what the template of this id holds.
function copyOf(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

class ReplyView {
  constructor() {
    this.element = copyOf("reply");
    this.thoughts = new Thoughts(this.element.querySelector(".reasoning"));
    this.content = this.element.querySelector(".content");
    this.calls = [];
    this.id = null; // as the server has it, once there is a token
    this.error = null;
    this.trail = new TokenTrail();
    this.sentAt = performance.now();
    this.firstAt = null;
    this.numFirst = 0; // tokens of the first chunk, which took no time after it
    this.numTokens = 0;
    this.numAccepted = 0;
  }

  // One event of the stream. Throws for an error event.
  take(event) {
    if (event.error) throw new Refusal(200, event.error.message, event.error.code);
    this.id = event.id;
    const choice = event.choices[0];
    if (choice !== undefined) this.takeChoice(choice);
    if (event.usage) this.thoughts.count(event.usage.completion_tokens_details?.reasoning_tokens);
    if (event.metrics) this.showMetrics(event.metrics);
  }

  takeChoice(choice) {
    const { count, drafted } = this.trail.add(choice);
    const { reasoning_content: reasoning = "", content, tool_calls: calls = [] } = choice.delta;
    if (drafted > 0) this.element.classList.add("speculated"); // before, its tokens are not told apart
    if (count > 0) this.countTokens(count, drafted);
    if (reasoning) this.thoughts.append(this.trail.take(reasoning), count);
    if (content || calls.length > 0) this.thoughts.end();
    if (content) appendPieces(this.content, this.trail.take(content));
    for (const call of calls) this.takeCall(call);
    if (choice.finish_reason) this.note(END_REASONS[choice.finish_reason] ?? "");
  }

  takeCall(part) {
    if (this.calls[part.index] === undefined) {
      this.calls[part.index] = new CallView(part);
      this.element.querySelector(".calls").append(this.calls[part.index].element);
    }
    this.calls[part.index].append(part, this.trail);
  }

  countTokens(count, drafted) {
    const now = performance.now();
    if (this.firstAt === null) {
      this.firstAt = now;
      this.numFirst = count;
      this.figure("ttft", saySeconds((now - this.sentAt) / 1000));
    }
    this.numTokens += count;
    this.numAccepted += drafted;
    this.figure("tokens", sayNumber(this.numTokens));
    this.figure("accepted", sayNumber(this.numAccepted));
    const elapsed = (now - this.firstAt) / 1000;
    if (elapsed > 0.2) this.figure("speed", sayNumber((this.numTokens - this.numFirst) / elapsed));
  }

  // The server's own account, which knows what the stream cannot show.
  showMetrics(metrics) {
    const speculation = metrics.speculative_decoding;
    if (metrics.time_to_first_token_ms !== null) {
      this.figure("ttft", saySeconds(metrics.time_to_first_token_ms / 1000));
    }
    if (metrics.tokens_per_second !== null) this.figure("speed", sayNumber(metrics.tokens_per_second));
    this.showDrafts(speculation.num_draft_tokens, speculation.num_accepted_draft_tokens);
  }

  // Drafts that were verified so far, and how many of them were accepted.
  showDrafts(drafted, accepted) {
    this.figure("drafts", sayNumber(drafted));
    this.figure("accepted", sayNumber(accepted));
    this.figure("rejected", sayNumber(drafted - accepted));
  }

  figure(name, text) {
    this.element.querySelector(`.${name}`).textContent = text;
    this.element.querySelector(".summary").hidden = false;
  }

  // One more sentence under it.
  note(text) {
    const element = this.element.querySelector(".note");
    element.textContent = [element.textContent, text].filter(Boolean).join(" ");
  }

  end() {
    this.thoughts.end();
    this.element.classList.remove("running");
  }

  // True if there is nothing in it that a next turn could build upon.
  get isEmpty() {
    return this.content.textContent === "" && this.calls.length === 0;
  }

  // As the next request tells it.
  get message() {
    const message = { role: "assistant", content: this.content.textContent || null };
    if (this.thoughts.text !== "") message.reasoning_content = this.thoughts.text;
    if (this.calls.length > 0) message.tool_calls = this.calls.map((call) => call.told);
    return message;
  }
}

// What the model thinks: folded, under a line that says how much it is.
class Thoughts {
  constructor(details) {
    this.details = details;
    this.body = details.querySelector(".text");
    this.numTokens = 0;
    this.startedAt = null;
    this.seconds = null; // once it has ended
  }

  get text() {
    return this.body.textContent;
  }

  append(pieces, numTokens) {
    this.startedAt ??= performance.now();
    this.details.hidden = false;
    this.numTokens += numTokens;
    appendPieces(this.body, pieces);
    this.say();
  }

  // The server's count, undefined for a model that never thinks.
  count(numTokens) {
    if (!numTokens || this.startedAt === null) return;
    this.numTokens = numTokens;
    this.say();
  }

  end() {
    if (this.startedAt === null || this.seconds !== null) return;
    this.seconds = (performance.now() - this.startedAt) / 1000;
    this.say();
  }

  say() {
    const verb = this.seconds === null ? "Thinking" : "Thought";
    const seconds = this.seconds ?? (performance.now() - this.startedAt) / 1000;
    const count = `${sayNumber(this.numTokens)} token${this.numTokens === 1 ? "" : "s"}`;
    this.details.querySelector("summary").textContent = `${verb}: ${count}, ${saySeconds(seconds)}`;
  }
}

// A call of a tool, and a field for what the tool answers.
class CallView {
  constructor(part) {
    this.element = copyOf("call");
    this.id = part.id;
    this.type = part.type;
    this.name = part[part.type].name;
    this.element.querySelector("h3").textContent = this.name;
    this.body = this.element.querySelector("pre");
    this.input = this.element.querySelector("input");
    this.input.setAttribute("aria-label", `Result of ${this.name}`);
  }

  append(part, trail) {
    appendPieces(this.body, trail.take(part.function?.arguments ?? part.custom?.input ?? ""));
  }

  get told() {
    const text = this.body.textContent;
    const call = this.type === "custom" ? { input: text } : { arguments: text };
    return { id: this.id, type: this.type, [this.type]: { name: this.name, ...call } };
  }

  get result() {
    return { role: "tool", tool_call_id: this.id, content: this.input.value };
  }
}

function appendPieces(element, pieces) {
  element.append(...pieces.map(tokenElement));
}

function tokenElement({ text, drafted, probability }) {
  const span = document.createElement("span");
  span.textContent = text;
  const origin = drafted ? "an accepted draft" : "the model's own";
  const odds = probability === null ? "" : `probability ${sayShare(probability)}`;
  span.title = [drafted === null ? "" : origin, odds].filter(Boolean).join(", ");
  if (drafted !== null) span.className = drafted ? "drafted" : "own";
  return span;
}
