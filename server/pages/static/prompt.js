"use strict";
// The prompt box: one request at a time, its reply as it streams, and what it took.

const END_REASONS = { length: "Cut at max tokens.", abort: "Ended by the server." };

class PromptBox {
  constructor(access) {
    this.access = access;
    this.reply = document.getElementById("reply");
    this.failure = document.getElementById("failure");
    this.controller = null; // of the request that runs
    this.form = document.getElementById("ask");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.form.addEventListener("keydown", (event) => this.onKey(event));
    document.getElementById("stop").addEventListener("click", () => this.stop());
  }

  onKey(event) {
    if (event.key === "Escape") this.stop();
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing; // else it ends a word's input
    if (!sends || event.target.id !== "prompt") return;
    event.preventDefault();
    this.form.requestSubmit();
  }

  // Leaving is how a client cancels: the server ends the request within a step.
  stop() {
    this.controller?.abort();
  }

  async send() {
    if (this.controller !== null) return;
    this.controller = new AbortController();
    const body = this.body();
    const run = new PromptRun(this.reply, body.speculation === undefined);
    this.begin();
    try {
      const response = await this.access.fetch("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal: this.controller.signal,
      });
      for await (const event of readEvents(response.body)) run.take(event);
      setText("reply-note", [END_REASONS[run.finishReason], run.mergedNote].filter(Boolean).join(" "));
    } catch (error) {
      if (error.name === "AbortError") setText("reply-note", "Stopped; the server has cancelled it.");
      else this.fail(error);
    } finally {
      run.end();
      this.controller = null;
      this.showRunning(false);
    }
  }

  // An empty field leaves the choice to the server.
  body() {
    const number = (id) => {
      const { value, valueAsNumber } = document.getElementById(id);
      return value === "" ? undefined : valueAsNumber;
    };
    return {
      messages: [{ role: "user", content: document.getElementById("prompt").value }],
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
      logprobs: true,
      temperature: number("temperature"),
      max_tokens: number("max-tokens"),
      speculation: document.getElementById("speculate").checked ? undefined : { enabled: false },
    };
  }

  begin() {
    this.failure.hidden = true;
    document.getElementById("summary").hidden = false;
    setText("reply-note", "");
    this.showRunning(true);
  }

  showRunning(running) {
    document.getElementById("send").hidden = running;
    document.getElementById("stop").hidden = !running;
    this.reply.classList.toggle("running", running);
  }

  fail(error) {
    const keyless = error.status === 401;
    this.failure.textContent = keyless ? "This server asks for an API key: give one below." : error.message;
    this.failure.hidden = false;
    setText("reply-note", "");
  }
}

// One reply: its text, and its figures as the browser sees them until the server tells its own.
class PromptRun {
  constructor(reply, speculates) {
    this.reply = reply;
    this.reply.replaceChildren();
    this.reply.classList.toggle("undrafted", !speculates);
    this.splitter = new ChunkSplitter();
    this.sentAt = performance.now();
    this.firstAt = null;
    this.numFirst = 0; // tokens of the first chunk, which took no time after it
    this.numTokens = 0;
    this.numTinted = 0;
    this.numAccepted = null; // by the server's account, null before it
    this.finishReason = null;
    for (const id of ["reply-ttft", "reply-speed", "reply-tokens", "reply-accepted"]) setText(id, "–");
  }

  // One chunk of the stream. Throws for an error event.
  take(event) {
    if (event.error) throw new Refusal(200, event.error.message, event.error.code);
    const choice = event.choices[0];
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (choice !== undefined) this.takeTokens(choice);
    if (event.metrics) this.showMetrics(event.metrics);
  }

  takeTokens(choice) {
    const count = choice.token_ids?.length ?? 0;
    if (count === 0) return;
    const now = performance.now();
    if (this.firstAt === null) {
      this.firstAt = now;
      this.numFirst = count;
      setText("reply-ttft", saySeconds((now - this.sentAt) / 1000));
    }
    this.numTokens += count;
    this.numTinted += count - 1;
    setText("reply-tokens", sayNumber(this.numTokens));
    const elapsed = (now - this.firstAt) / 1000;
    if (elapsed > 0.2) setText("reply-speed", `${sayNumber((this.numTokens - this.numFirst) / elapsed)} /s`);
    this.append(this.splitter.split(choice));
  }

  append(pieces) {
    const { scrollTop, scrollHeight, clientHeight } = this.reply;
    const follows = scrollHeight - scrollTop - clientHeight < 40;
    this.reply.append(...pieces.filter((piece) => piece.text !== "").map(tokenElement));
    if (follows) this.reply.scrollTop = this.reply.scrollHeight;
  }

  // The server's own account, which knows what the stream cannot show.
  showMetrics(metrics) {
    const speculation = metrics.speculative_decoding;
    const { num_draft_tokens: drafted, num_accepted_draft_tokens: accepted } = speculation;
    if (metrics.time_to_first_token_ms !== null) {
      setText("reply-ttft", saySeconds(metrics.time_to_first_token_ms / 1000));
    }
    if (metrics.tokens_per_second !== null) setText("reply-speed", `${sayNumber(metrics.tokens_per_second)} /s`);
    setText("reply-accepted", drafted > 0 ? `${accepted} of ${drafted}` : "none drafted");
    this.numAccepted = accepted;
    if (accepted === 0) this.reply.classList.add("undrafted");
  }

  // What the tint gets wrong: steps whose tokens the server had to send together.
  get mergedNote() {
    const merged = this.numAccepted ? this.numTinted - this.numAccepted : 0;
    return merged > 0 ? sayCount(merged, "tinted token", "came merged with others, not drafted.") : "";
  }

  end() {
    document.getElementById("summary").hidden = this.numTokens === 0;
  }
}

function tokenElement({ text, drafted, probability }) {
  const span = document.createElement("span");
  span.textContent = text;
  const odds = probability === null ? "" : `probability ${sayShare(probability)}`;
  span.title = [drafted ? "drafted and accepted" : "", odds].filter(Boolean).join(", ");
  if (drafted) span.className = "drafted";
  return span;
}
