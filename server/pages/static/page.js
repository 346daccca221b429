"use strict";
// Asks the server how it is, once a second while the page can be seen, and shows what it says.

const PERIOD_MS = 1000;
const PATIENCE_MS = 10000;
const STATES = {
  ready: "ready",
  loading: "loading the model",
  draining: "shutting down",
  engine_dead: "engine stopped",
  engine_hung: "engine hangs",
  unreachable: "cannot be reached",
};

class Page {
  constructor() {
    this.figures = new Figures();
    this.access = new Access(() => this.start());
    this.prompts = new PromptBox(this.access);
    this.timer = null;
    this.controller = null; // of the scrape that runs
    document.getElementById("theme").addEventListener("click", toggleTheme);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    setText("base-url", `${location.origin}/v1`);
    if (!document.hidden) this.start();
  }

  // Scrape now, and from then on after each period.
  start() {
    this.stop();
    const controller = (this.controller = new AbortController());
    this.scrape(controller.signal).finally(() => {
      if (this.controller === controller) this.timer = setTimeout(() => this.start(), PERIOD_MS);
    });
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
    clearTimeout(this.timer);
  }

  async scrape(signal) {
    const timed = AbortSignal.any([signal, AbortSignal.timeout(PATIENCE_MS)]);
    const [state, problem] = await Promise.all([this.readState(timed), this.readFigures(timed)]);
    if (signal.aborted) return;
    const unreachable = state === "unreachable";
    const element = document.getElementById("state");
    element.dataset.state = state;
    setText("state", STATES[state] ?? state);
    document.getElementById("figures").classList.toggle("stale", unreachable || problem !== "");
    this.warn(unreachable ? "The server cannot be reached. Trying again every second." : problem);
  }

  // One word of STATES: what /health/ready says.
  async readState(signal) {
    try {
      await this.access.fetch("/health/ready", { signal });
      return "ready";
    } catch (refusal) {
      return refusal.status === 0 ? "unreachable" : (refusal.code ?? `answers ${refusal.status}`);
    }
  }

  // Shows a scrape; what stood in its way, "" for nothing.
  async readFigures(signal) {
    try {
      const response = await this.access.fetch("/metrics", { signal });
      const snapshot = readSnapshot(new Exposition(await response.text()), performance.now() / 1000);
      this.showFacts(snapshot, Date.parse(response.headers.get("date")) || Date.now());
      this.figures.add(snapshot);
      return "";
    } catch (error) {
      if (error.status === 401) return "The figures need an API key on this server: give one under “API key”.";
      return error.message;
    }
  }

  // `serverMs` is the server's own clock, which its start was read from too.
  showFacts({ model, version, started }, serverMs) {
    setText("model", model);
    setText("version", version ? `v${version}` : "");
    setText("uptime", started > 0 ? `up ${sayDuration(serverMs / 1000 - started)}` : "");
    document.title = model ? `${model} · Slipstream` : "Slipstream";
  }

  warn(text) {
    const banner = document.getElementById("banner");
    if (banner.textContent !== text) banner.textContent = text;
    banner.hidden = text === "";
  }
}

new Page();
