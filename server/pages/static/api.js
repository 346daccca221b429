"use strict";
// Draws the description with Swagger UI, and takes the viewer's key where the server asks for one.

const KEY_NAME = "slipstream.key"; // the status page's too, so that a key given there is known here
const SCHEME = "key"; // as the description calls it

class ApiPage {
  constructor() {
    this.key = recall("sessionStorage", KEY_NAME) ?? "";
    this.form = document.getElementById("key-form");
    this.input = document.getElementById("key");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.keep(this.input.value.trim());
    });
    document.getElementById("forget").addEventListener("click", () => this.keep(""));
    document.getElementById("theme").addEventListener("click", () => {
      toggleTheme();
      this.paint();
    });
    darkSystem.addEventListener("change", () => this.paint());
    this.paint();
    this.load();
  }

  // Swagger UI has a dark style of its own, chosen by a class.
  paint() {
    const shown = document.documentElement.dataset.theme ?? (darkSystem.matches ? "dark" : "light");
    document.documentElement.classList.toggle("dark-mode", shown === "dark");
  }

  keep(key) {
    this.key = key;
    this.input.value = "";
    remember("sessionStorage", KEY_NAME, key || null);
    this.load();
  }

  async load() {
    const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
    document.getElementById("forget").hidden = !this.key;
    try {
      const response = await fetch("openapi.json", { headers, cache: "no-store", credentials: "same-origin" });
      if (response.status === 401) return this.ask();
      if (!response.ok) return this.say(`The server answered ${response.status}.`);
      this.draw(await response.json());
    } catch (error) {
      this.say(error instanceof TypeError ? "The server cannot be reached." : error.message);
    }
  }

  // Nothing of the server is shown without its key.
  ask() {
    document.getElementById("api").replaceChildren();
    this.form.hidden = false;
    this.say(this.key ? "The server does not accept this key." : "This server asks for an API key.");
    this.input.focus();
  }

  draw(description) {
    const keyed = SCHEME in (description.components.securitySchemes ?? {});
    this.form.hidden = !keyed;
    this.say(keyed ? "A key is kept for this tab, and sent with what you try here." : "");
    const swagger = SwaggerUIBundle({
      spec: description,
      dom_id: "#api",
      deepLinking: true,
      displayRequestDuration: true,
      defaultModelsExpandDepth: 0,
      validatorUrl: null, // nothing is sent to another server
      onComplete: () => keyed && swagger.preauthorizeApiKey(SCHEME, this.key),
    });
  }

  say(text) {
    document.getElementById("note").textContent = text;
  }
}

new ApiPage();
