"use strict";
// The viewer's API key, kept for this tab only, and requests that carry it.

const KEY_NAME = "slipstream.key";

// What the server answered in place of what was asked for. `status` is 0 when it did not answer at all.
class Refusal extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function refusalOf(response) {
  const body = await response.json().catch(() => null);
  const error = body?.error ?? {};
  const message = typeof error.message === "string" ? error.message : `The server answered ${response.status}.`;
  const wait = response.headers.get("retry-after");
  const hint = wait === null ? "" : ` Try again in ${wait} s.`;
  return new Refusal(response.status, message + hint, error.code ?? null);
}

class Access {
  // `onChange` is called when the viewer gives or forgets a key.
  constructor(onChange) {
    this.key = recall("sessionStorage", KEY_NAME) ?? "";
    this.asked = false;
    this.opened = false; // by us, not by the viewer
    this.input = document.getElementById("key");
    this.details = document.getElementById("access");
    document.getElementById("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.set(this.input.value.trim());
      onChange();
    });
    document.getElementById("forget").addEventListener("click", () => {
      this.set("");
      onChange();
    });
    this.tell();
  }

  set(key) {
    const usable = /^[\x21-\x7e]*$/.test(key);
    if (usable) {
      this.key = key;
      this.asked = false;
      remember("sessionStorage", KEY_NAME, key || null);
      this.input.value = "";
    }
    this.tell(usable ? "" : "A key has only plain ASCII characters and no spaces.");
  }

  tell(problem = "") {
    setText("key-note", problem || (this.key ? "A key is kept for this tab." : "No key is kept."));
    document.getElementById("forget").hidden = !this.key;
  }

  // The server wants a key that this page has not, or not the right one: show where it goes, once.
  ask() {
    if (this.asked) return;
    this.asked = true;
    this.opened ||= !this.details.open;
    this.details.open = true;
    this.tell(this.key ? "The server does not accept this key." : "The server asks for a key.");
    this.input.focus({ preventScroll: true });
  }

  // The key is good, or none is needed: what was opened to ask for one closes.
  settle() {
    if (this.opened) this.details.open = false;
    this.opened = false;
  }

  // fetch, with the key. Throws Refusal for any answer but a good one; an abort stays an AbortError.
  async fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      const late = error.name === "TimeoutError";
      throw new Refusal(0, late ? "The server does not answer." : "The server cannot be reached.");
    }
    if (response.ok) return response;
    if (response.status === 401) this.ask();
    throw await refusalOf(response);
  }
}
