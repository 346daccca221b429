"use strict";
// The live requests that the viewer's key may see, each with a button that ends it.

const MOST_SHOWN = 50;

class LiveRequests {
  constructor(access) {
    this.access = access;
    this.body = document.getElementById("live-rows");
    this.rows = new Map(); // by the request's id
  }

  // Shows them, and gives them. Throws Refusal.
  async read(signal) {
    const response = await this.access.fetch(`/v1/requests?limit=${MOST_SHOWN}`, { signal });
    const { data, has_more: hasMore } = await response.json();
    if (!signal.aborted) this.show(data, hasMore);
    return data;
  }

  show(requests, hasMore) {
    const gone = new Set(this.rows.keys());
    for (const request of requests) {
      gone.delete(request.id);
      this.rowOf(request.id).show(request);
    }
    for (const id of gone) {
      this.rows.get(id).element.remove();
      this.rows.delete(id);
    }
    document.getElementById("live").hidden = requests.length === 0;
    const whose = this.access.key ? "with this key" : "";
    const none = requests.length === 0 ? `None ${whose}`.trim() : whose;
    setText("live-note", hasMore ? `The oldest ${MOST_SHOWN} ${whose}`.trim() : none);
  }

  // The server does not say which there are.
  forget() {
    this.show([], false);
    setText("live-note", "Not known");
  }

  // The same row as long as the request lives, so that its button stays where it is.
  rowOf(id) {
    if (!this.rows.has(id)) {
      const row = new RequestRow(id, () => this.cancel(id));
      this.rows.set(id, row);
      this.body.append(row.element);
    }
    return this.rows.get(id);
  }

  async cancel(id) {
    const row = this.rows.get(id);
    row.button.disabled = true;
    try {
      await this.access.fetch(`/v1/requests/${encodeURIComponent(id)}/cancel`, {
        method: "POST",
        headers: { "content-type": "application/json" },
      });
    } catch (error) {
      if (error.status === 404) return; // it has ended by itself
      row.button.disabled = false;
      row.tell("why", error.message);
    }
  }
}

class RequestRow {
  constructor(id, onCancel) {
    this.element = copyOf("live-row");
    this.button = this.element.querySelector("button");
    this.button.setAttribute("aria-label", `Cancel ${id}`);
    this.button.addEventListener("click", onCancel);
  }

  // Figures of a request of several choices are those of all that still run.
  show({ id, label, age_ms: age, choices }) {
    const sum = (name) => choices.reduce((total, choice) => total + choice[name], 0);
    const [first] = choices;
    const states = new Set(choices.map((choice) => choice.status));
    const drafted = sum("draft_tokens");
    this.tell("name", label || id);
    this.element.querySelector(".name").title = id;
    this.tell("status", [...states].join(", ") + (choices.length > 1 ? `, ${choices.length} choices` : ""));
    this.tell("why", choices.find((choice) => choice.waits_because)?.waits_because ?? "");
    this.tell("age", saySeconds(age / 1000));
    this.tell("read", sayNumber(first.known_tokens - first.generated_tokens));
    this.tell("written", sayNumber(sum("generated_tokens")));
    this.tell("drafts", drafted ? `${sayNumber(sum("accepted_draft_tokens"))} of ${sayNumber(drafted)}` : "–");
    this.tell("priority", String(first.priority));
  }

  tell(name, text) {
    const element = this.element.querySelector(`.${name}`);
    if (element.textContent !== text) element.textContent = text;
  }
}
