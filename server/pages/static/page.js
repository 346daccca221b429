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
    this.chat = new Chat(this.access);
    this.requests = new LiveRequests(this.access);
    this.timer = null;
    this.controller = null; // of the look that runs
    document.getElementById("theme").addEventListener("click", toggleTheme);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    setText("base-url", `${location.origin}/v1`);
    if (!document.hidden) this.start();
  }

  // Look now, and from then on after each period.
  start() {
    this.stop();
    const controller = (this.controller = new AbortController());
    this.look(controller.signal).finally(() => {
      if (this.controller === controller) this.timer = setTimeout(() => this.start(), PERIOD_MS);
    });
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
    clearTimeout(this.timer);
  }

  async look(signal) {
    const timed = AbortSignal.any([signal, AbortSignal.timeout(PATIENCE_MS)]);
    const [state, problem] = await Promise.all([
      this.readState(timed),
      this.readFigures(timed),
      this.readRequests(timed),
    ]);
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

  // Shows what came since the last time, at first all that the server has kept; what stood in the way, "" for
  // nothing.
  async readFigures(signal) {
    try {
      const after = this.figures.timeline.latest?.at ?? -1;
      const response = await this.access.fetch(`/status/figures?after=${after}`, { signal });
      const { samples, ...facts } = await response.json();
      if (signal.aborted) return "";
      this.figures.add(samples.map((sample) => readSnapshot(sample, facts)));
      this.showFacts(facts, samples.at(-1).at);
      this.access.settle();
      return "";
    } catch (error) {
      if (error.status === 401) return "The figures need an API key on this server: give one under “API key”.";
      return error.message;
    }
  }

  // What stands in its way stands in that of the figures, too, which say so.
  async readRequests(signal) {
    try {
      this.chat.showLive(await this.requests.read(signal));
    } catch {
      if (!signal.aborted) this.requests.forget();
    }
  }

  // `age` is in seconds since the server's start.
  showFacts({ model, version }, age) {
    setText("model", model);
    setText("version", version ? `v${version}` : "");
    setText("uptime", `up ${sayDuration(age)}`);
    document.title = model ? `${model} · Slipstream` : "Slipstream";
  }

  warn(text) {
    const banner = document.getElementById("banner");
    if (banner.textContent !== text) banner.textContent = text;
    banner.hidden = text === "";
  }
}

new Page();
