"use strict";
// From what the server counts to the cards: how each figure is shown.

const RATE_S = LONGEST_STEP_S; // smooths the line, and is there however slowly samples come
const RECENT_S = 60;
const DRAFTS_S = 10;
const LATENCY_SHARES = [0.5, 0.95];
const LEAST_SPAN_S = 60;
const SPAN_WORDS = sayDuration(HISTORY_S);

// A sample of the server's with its histograms as [bound, observations at or below it], rising. `facts` are
// those that the reply gives once for all its samples.
function readSnapshot(sample, { started, bounds, no_drafts_because: whyOff = null }) {
  const histogram = (name) => sample[name].map((total, i) => [bounds[name][i] ?? Infinity, total]);
  const [used, cached, free] = sample.kv;
  const histograms = { ttft: histogram("ttft"), itl: histogram("itl") };
  return { ...sample, started, whyOff, ...histograms, kv: { used, cached, free } };
}

// What the charts draw for the latest snapshot; null where nothing is known.
function chartValues(timeline) {
  const now = timeline.latest;
  const blocks = now.kv.used + now.kv.cached + now.kv.free;
  const drafts = timeline.growth((each) => each.rounds, DRAFTS_S);
  return {
    "tokens-per-second": [timeline.rate((each) => each.generated, RATE_S)],
    requests: [now.running, now.waiting],
    ttft: timeline.quantiles((each) => each.ttft, LATENCY_SHARES, RECENT_S),
    itl: timeline.quantiles((each) => each.itl, LATENCY_SHARES, RECENT_S),
    acceptance: [timeline.ratio((each) => each.accepted, (each) => each.drafted, DRAFTS_S)],
    speedup: [drafts ? now.speedup : null],
    kv: blocks ? [now.kv.used / blocks, now.kv.cached / blocks] : [null, null],
  };
}

const CHARTS = {
  "tokens-per-second": { name: "Tokens per second", format: sayNumber, floor: 10 },
  requests: { name: "Requests running and waiting", format: sayNumber, floor: 5 },
  ttft: { name: "Time to first token, p50 and p95", format: saySeconds, floor: 0.01 },
  itl: { name: "Time between tokens, p50 and p95", format: saySeconds, floor: 0.001 },
  acceptance: { name: "Share of drafts accepted", format: sayShare, floor: 1 },
  speedup: { name: "Speed-up by speculation", format: sayTimes, floor: 2, mark: 1 },
  kv: { name: "Share of the cache used and cached", format: sayShare, floor: 1 },
};

// The cards, all of them redrawn from the timeline with each new snapshot.
class Figures {
  constructor() {
    this.timeline = new Timeline();
    this.charts = new Map();
    for (const figure of document.querySelectorAll("[data-chart]")) {
      const name = figure.dataset.chart;
      this.charts.set(name, new Chart(figure, CHARTS[name]));
    }
    this.drawCharts();
  }

  // `snapshots` in order of time; the last is shown.
  add(snapshots) {
    for (const snapshot of snapshots) {
      this.timeline.add(snapshot);
      snapshot.charted = chartValues(this.timeline);
    }
    this.show(this.timeline.latest);
  }

  show(snapshot) {
    this.drawCharts();
    this.showSpeed(snapshot);
    this.showDrafts(snapshot);
    this.showCache(snapshot);
    for (const [name, count] of Object.entries(snapshot.counts)) this.showCount(name, count);
  }

  drawCharts() {
    const { snapshots, latest } = this.timeline;
    const length = snapshots.length > 0 ? latest.at - snapshots[0].at : 0;
    const span = Math.min(Math.max(60 * Math.ceil(length / 60), LEAST_SPAN_S), HISTORY_S); // whole minutes
    for (const [name, chart] of this.charts) {
      const points = snapshots.map((each) => ({ age: latest.at - each.at, values: each.charted[name] }));
      chart.draw(points, span);
    }
  }

  showSpeed({ charted, generated, running, waiting, swapped }) {
    const within = (pick) => this.timeline.growth((each) => pick(each).at(-1)?.[1] ?? 0, RECENT_S);
    setText("tokens-per-second", say(charted["tokens-per-second"][0], sayNumber));
    setText("tokens-note", `${sayNumber(generated)} since the start`);
    setText("running", sayNumber(running));
    setText("waiting", sayNumber(waiting));
    setText("requests-note", swapped > 0 ? `${sayNumber(swapped)} swapped to host memory` : "none swapped out");
    for (const name of ["ttft", "itl"]) {
      setText(`${name}-p50`, say(charted[name][0], saySeconds));
      setText(`${name}-p95`, say(charted[name][1], saySeconds));
    }
    setText("ttft-note", sayCount(within((each) => each.ttft), "request", "in the last minute"));
    setText("itl-note", sayCount(within((each) => each.itl), "interval", "in the last minute"));
  }

  showDrafts({ whyOff }) {
    const grown = (pick) => this.timeline.growth(pick, HISTORY_S) ?? 0;
    const drafted = grown((each) => each.drafted);
    const accepted = grown((each) => each.accepted);
    const rounds = grown((each) => each.rounds);
    setText("acceptance", drafted > 0 ? sayShare(accepted / drafted) : "–");
    setText(
      "acceptance-note",
      drafted > 0 ? `${sayNumber(accepted)} of ${sayNumber(drafted)} in ${SPAN_WORDS}` : `nothing drafted in ${SPAN_WORDS}`,
    );
    setText("speedup", rounds > 0 ? sayTimes(this.timeline.latest.speedup) : "–");
    const perRound = `${(1 + accepted / rounds).toFixed(1)} tokens a step with drafts`;
    setText("speedup-note", whyOff ?? (rounds > 0 ? perRound : `no step verified drafts in ${SPAN_WORDS}`));
  }

  showCache({ kv, charted }) {
    const blocks = kv.used + kv.cached + kv.free;
    const [used, cached] = charted.kv;
    const hits = this.timeline.ratio((each) => each.prefix[1], (each) => each.prefix[0], HISTORY_S);
    setText("kv-used", say(used, sayShare));
    setText("kv-cached", say(cached, sayShare));
    const prefix = hits === null ? "" : ` · ${sayShare(hits)} prefix hits`;
    const free = `${sayNumber(kv.free)} of ${sayNumber(blocks)} blocks free`;
    setText("kv-note", blocks > 0 ? free + prefix : "not allocated yet");
  }

  showCount(name, count) {
    const recent = this.timeline.growth((each) => each.counts[name], HISTORY_S) ?? 0;
    const cell = document.getElementById(`count-${name}`);
    cell.textContent = recent > 0 ? `${sayNumber(count)} (+${sayNumber(recent)})` : sayNumber(count);
    cell.title = recent > 0 ? `${sayNumber(recent)} in the last ${SPAN_WORDS}` : "";
    cell.classList.toggle("risen", recent > 0);
  }
}
