"use strict";
// The chat: what is asked, one request at a time, and what the next request tells of the turns before.

class Chat {
  constructor(access) {
    this.access = access;
    this.log = new ChatLog(document.getElementById("log"));
    this.prompt = document.getElementById("prompt");
    this.messages = []; // of the turns that are kept
    this.last = null; // their last reply
    this.running = null; // the reply that streams
    this.controller = null; // of its request
    this.form = document.getElementById("ask");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.form.addEventListener("keydown", (event) => this.onKey(event));
    document.getElementById("stop").addEventListener("click", () => this.stop());
    document.getElementById("restart").addEventListener("click", () => this.restart());
  }

  onKey(event) {
    if (event.key === "Escape") this.stop();
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing; // else it ends a word's input
    if (!sends || event.target !== this.prompt) return;
    event.preventDefault();
    this.form.requestSubmit();
  }

  // Leaving is how a client cancels: the server ends the request within a step.
  stop() {
    this.controller?.abort();
  }

  restart() {
    this.stop();
    this.messages = [];
    this.last = this.running = null;
    this.log.clear();
    this.tellFailure("");
    document.getElementById("restart").hidden = true;
    this.prompt.focus();
  }

  async send() {
    const text = this.prompt.value;
    const said = this.collect(text);
    if (this.controller !== null || said.length === 0) return;
    this.tellFailure("");
    try {
      const body = this.body(said);
      await this.run(text, said, body);
    } catch (error) {
      this.tellFailure(error.message);
    }
  }

  // What this turn adds: the results of the calls that the last reply ended with, then the viewer's words.
  collect(text) {
    const results = this.last === null ? [] : this.last.calls.map((call) => call.result);
    const isAnswer = results.some((result) => result.content !== "");
    if (text.trim() !== "") return [...results, { role: "user", content: text }];
    return isAnswer ? results : [];
  }

  // An empty field leaves the choice to the server. Throws when the tools are not JSON.
  body(said) {
    const number = (id) => {
      const { value, valueAsNumber } = document.getElementById(id);
      return value === "" ? undefined : valueAsNumber;
    };
    const system = document.getElementById("system").value.trim();
    return {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages, ...said],
      tools: readTools(document.getElementById("tools").value),
      stream: true,
      stream_options: { include_usage: true },
      return_token_origins: true,
      logprobs: true,
      temperature: number("temperature"),
      max_tokens: number("max-tokens"),
      speculation: document.getElementById("speculate").checked ? undefined : { enabled: false },
    };
  }

  // One request. A turn that fails is not part of the chat: the next request says nothing of it.
  async run(text, said, body) {
    const controller = (this.controller = new AbortController());
    const reply = (this.running = new ReplyView());
    const question = text.trim() === "" ? [] : [questionElement(text)];
    this.log.add(...question, reply.element);
    this.prompt.value = "";
    this.showRunning(true);
    let failure = null;
    try {
      const response = await this.access.fetch("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal: controller.signal,
      });
      for await (const event of readEvents(response.body)) this.log.grow(() => reply.take(event));
    } catch (error) {
      if (error.name === "AbortError") reply.note("Stopped; the server has cancelled it.");
      else failure = error;
    }
    this.controller = null;
    this.showRunning(false);
    if (this.running !== reply) return; // a new chat has begun meanwhile
    this.log.grow(() => reply.end());
    this.running = null;
    if (failure === null && !reply.isEmpty) this.keep(said, reply);
    else this.drop(text, [...question, reply.element], reply, failure);
  }

  keep(said, reply) {
    for (const call of this.last?.calls ?? []) call.input.readOnly = true;
    this.messages.push(...said, reply.message);
    this.last = reply;
    const isFree = document.activeElement === this.prompt && this.prompt.value === "";
    if (isFree) reply.calls[0]?.input.focus({ preventScroll: true });
  }

  // What came of it stays to be read, and the words are given back.
  drop(text, elements, reply, failure) {
    if (this.prompt.value === "") this.prompt.value = text;
    if (failure !== null) this.tellFailure(keyless(failure) ?? failure.message);
    const isSeen = failure === null || reply.numTokens > 0;
    this.log.grow(() => {
      if (isSeen) reply.note("The next message leaves this turn out.");
      for (const element of elements) isSeen ? element.classList.add("dropped") : element.remove();
    });
  }

  // What the list of live requests says of the reply that streams.
  showLive(requests) {
    const [choice] = requests.find((request) => request.id === this.running?.id)?.choices ?? [];
    if (choice === undefined) return;
    this.log.grow(() => this.running.showDrafts(choice.draft_tokens, choice.accepted_draft_tokens));
  }

  showRunning(running) {
    document.getElementById("send").hidden = running;
    document.getElementById("stop").hidden = !running;
    document.getElementById("restart").hidden = false;
  }

  tellFailure(text) {
    setText("failure", text);
    document.getElementById("failure").hidden = text === "";
  }
}

// Where the turns stand. It stays at its end, whatever grows or shrinks, until the viewer scrolls up.
class ChatLog {
  constructor(element) {
    this.element = element;
    this.follows = true;
    this.top = 0; // where it was
    element.addEventListener("scroll", () => this.onScroll());
    new ResizeObserver(() => this.grow(() => {})).observe(element);
  }

  onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    if (scrollTop < this.top) this.follows = false;
    if (scrollHeight - scrollTop - clientHeight < 40) this.follows = true;
    this.top = scrollTop;
  }

  add(...turns) {
    this.follows = true;
    this.grow(() => this.element.append(...turns));
  }

  // Do what changes its height.
  grow(change) {
    change();
    if (this.follows) this.element.scrollTop = this.element.scrollHeight;
  }

  clear() {
    this.element.replaceChildren();
  }
}

function keyless(error) {
  return error.status === 401 ? "This server asks for an API key: give one below." : null;
}

function questionElement(text) {
  const element = document.createElement("div");
  element.className = "turn question";
  element.textContent = text;
  return element;
}

// The tools that the viewer gave: a list, one of them, or bare functions. Throws when it is not JSON.
function readTools(text) {
  if (text.trim() === "") return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}.`);
  }
  const tools = Array.isArray(value) ? value : [value];
  return tools.map((tool) => (tool?.name && !tool.type ? { type: "function", function: tool } : tool));
}
