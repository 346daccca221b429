"use strict";
// The last minutes of what the server counted, and what can be told from the difference of two samples.

const HISTORY_S = 600; // as long as the server keeps it
const LONGEST_STEP_S = 5; // further apart, two samples are a gap and no rate is told across it

// Snapshots in order of time, of one run of the server.
class Timeline {
  constructor() {
    this.snapshots = [];
  }

  get latest() {
    return this.snapshots.at(-1) ?? null;
  }

  // Counters or a clock that fell are those of another process: nothing before them can be compared.
  add(snapshot) {
    const last = this.latest;
    const fell = last !== null && (snapshot.at < last.at || snapshot.generated < last.generated);
    if (fell || snapshot.started !== last?.started) this.snapshots = [];
    this.snapshots.push(snapshot);
    const oldest = snapshot.at - HISTORY_S;
    while (this.snapshots[0].at < oldest) this.snapshots.shift();
  }

  // The first snapshot within the last `seconds`, null when the latest stands alone there.
  since(seconds) {
    const latest = this.latest;
    if (latest === null) return null;
    const first = this.snapshots.find((each) => each.at >= latest.at - seconds);
    return first === latest ? null : first;
  }

  // How much `pick(snapshot)` grew within the last `seconds`, null when that is not known.
  growth(pick, seconds) {
    const first = this.since(seconds);
    return first === null ? null : pick(this.latest) - pick(first);
  }

  // The same for each second.
  rate(pick, seconds) {
    const first = this.since(seconds);
    if (first === null) return null;
    return (pick(this.latest) - pick(first)) / (this.latest.at - first.at);
  }

  // The growth of `part` over the growth of `whole`, null when there was none.
  ratio(part, whole, seconds) {
    const total = this.growth(whole, seconds);
    return total ? this.growth(part, seconds) / total : null;
  }

  // Estimates of `shares` (0 to 1) of what was observed within the last `seconds`; null without any.
  quantiles(pick, shares, seconds) {
    const first = this.since(seconds);
    if (first === null) return shares.map(() => null);
    const before = new Map(pick(first));
    const buckets = pick(this.latest).map(([bound, total]) => [bound, total - (before.get(bound) ?? 0)]);
    return shares.map((share) => quantile(buckets, share));
  }
}

// Linear within its bucket, as PromQL has it; above the last bound nothing more than that bound is known.
function quantile(buckets, share) {
  const count = buckets.at(-1)?.[1] ?? 0;
  if (count === 0) return null;
  const rank = share * count;
  let low = 0;
  let below = 0;
  for (const [bound, total] of buckets) {
    if (total >= rank && total > below) {
      return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / (total - below);
    }
    low = bound;
    below = total;
  }
  return low;
}
