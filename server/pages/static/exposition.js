"use strict";
// Prometheus text, as GET /metrics gives it.

const SAMPLE_LINE = /^([A-Za-z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const SPECIAL_NUMBERS = { "+Inf": Infinity, "-Inf": -Infinity };

function unescapeLabel(text) {
  return text.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
}

function readLabels(text) {
  const labels = {};
  for (const [, name, value] of (text ?? "").matchAll(LABEL)) labels[name] = unescapeLabel(value);
  return labels;
}

// Every sample of one scrape, by name. A name that is missing reads as nothing counted.
class Exposition {
  constructor(text) {
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const match = SAMPLE_LINE.exec(line);
      if (match === null) continue;
      const [, name, labels, number] = match;
      if (!this.samples.has(name)) this.samples.set(name, []);
      const value = SPECIAL_NUMBERS[number] ?? Number(number);
      this.samples.get(name).push({ labels: readLabels(labels), value });
    }
  }

  // The sum of the samples that `accepts` their labels.
  sum(name, accepts = () => true) {
    let total = 0;
    for (const { labels, value } of this.samples.get(name) ?? []) if (accepts(labels)) total += value;
    return total;
  }

  // The first sample's label, "" when there is none.
  label(name, key) {
    return this.samples.get(name)?.[0]?.labels[key] ?? "";
  }

  // [bound, observations at or below it], rising.
  histogram(name) {
    const totals = new Map();
    for (const { labels, value } of this.samples.get(`${name}_bucket`) ?? []) {
      const bound = SPECIAL_NUMBERS[labels.le] ?? Number(labels.le);
      totals.set(bound, (totals.get(bound) ?? 0) + value);
    }
    return [...totals].sort(([a], [b]) => a - b);
  }
}
