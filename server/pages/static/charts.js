"use strict";
// A small line chart of the last minutes: one or two lines over the same time.

const CHART_WIDTH = 300;
const CHART_HEIGHT = 56;

// A round number at or above `value`.
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((m) => m * power).find((top) => top >= value * 0.999);
}

// `floor` is the least the top may be, so that a quiet line looks quiet. `mark` draws a line at that value.
class Chart {
  constructor(figure, { format, floor, mark = null, name }) {
    figure.append(document.getElementById("chart").content.cloneNode(true));
    this.svg = figure.querySelector("svg");
    this.readout = figure.querySelector(".readout");
    this.peak = figure.querySelector(".peak");
    this.oldest = figure.querySelector(".oldest");
    this.format = format;
    this.floor = floor;
    this.mark = mark;
    this.name = name;
    this.points = [];
    this.span = HISTORY_S;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  // `points` are {age, values}: seconds ago, and one number or null for each line. `span` is the width.
  draw(points, span) {
    this.points = points.filter((point) => point.age <= span);
    this.span = span;
    this.oldest.textContent = `${sayDuration(span)} ago`;
    const known = this.points.flatMap((point) => point.values).filter((value) => value !== null);
    const top = niceTop(Math.max(this.floor, ...known));
    this.peak.textContent = known.length > 0 ? this.format(top) : "";
    const lines = [0, 1].map((i) => this.trace(i, top));
    this.path("first", lines[0].line);
    this.path("area", lines[0].area);
    this.path("second", lines[1].line);
    this.path("mark", this.mark === null ? "" : `M0 ${chartY(this.mark, top)}H${CHART_WIDTH}`);
    const last = known.length > 0 ? this.points.at(-1).values.map((value) => this.say(value)) : ["no data"];
    this.svg.setAttribute("aria-label", `${this.name}, last ${sayDuration(span)}: now ${last.join(", ")}`);
  }

  x(age) {
    return round1(CHART_WIDTH * (1 - age / this.span));
  }

  // The path of line `i`, broken where nothing is known, and the area under it.
  trace(i, top) {
    let line = "";
    let area = "";
    let run = [];
    const close = () => {
      if (run.length === 1) run.push([run[0][0] + 1, run[0][1]]);
      if (run.length > 1) {
        const path = run.map(([x, y]) => `${x} ${y}`).join("L");
        line += `M${path}`;
        area += `M${run[0][0]} ${CHART_HEIGHT}L${path}L${run.at(-1)[0]} ${CHART_HEIGHT}Z`;
      }
      run = [];
    };
    let before = null;
    for (const { age, values } of this.points) {
      const value = values[i] ?? null;
      if (value === null || (before !== null && before - age > LONGEST_STEP_S)) close();
      if (value !== null) run.push([this.x(age), chartY(value, top)]);
      before = age;
    }
    close();
    return { line, area };
  }

  path(name, d) {
    this.svg.querySelector(`.${name}`).setAttribute("d", d);
  }

  say(value) {
    return value === null ? "–" : this.format(value);
  }

  // Say what is under the pointer, null for none.
  point(event) {
    const box = this.svg.getBoundingClientRect();
    const age = event === null ? null : this.span * (1 - (event.clientX - box.left) / box.width);
    const near = age === null ? undefined : nearest(this.points, age);
    this.path("cursor", near === undefined ? "" : `M${this.x(near.age)} 0V${CHART_HEIGHT}`);
    const values = near?.values.map((value) => this.say(value)).join(" / ");
    this.readout.textContent = near === undefined ? "" : `${sayAge(near.age)}: ${values}`;
  }
}

function chartY(value, top) {
  return round1(CHART_HEIGHT - (CHART_HEIGHT - 2) * (value / top) - 1);
}

function round1(value) {
  return Math.round(value * 10) / 10;
}

// The point closest to `age`, undefined when none is close.
function nearest(points, age) {
  const distance = (point) => Math.abs(point.age - age);
  const best = points.reduce((a, b) => (distance(b) < distance(a) ? b : a), points[0]);
  return best !== undefined && distance(best) <= LONGEST_STEP_S ? best : undefined;
}

function sayAge(seconds) {
  const whole = Math.round(seconds);
  if (whole === 0) return "now";
  return whole < 60 ? `${whole} s ago` : `${Math.floor(whole / 60)} min ${whole % 60} s ago`;
}
