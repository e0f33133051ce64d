// All curves, over time or steps. Over time: with what faults and stalls have cost.

import { FONT, fit, timeStep, ticks } from "./canvas.js";
import { $, el, press, say, observeVisible } from "./dom.js";
import { colour, onTheme } from "./theme.js";
import { count, measure, offset, short } from "./format.js";

const HEIGHT = 132;
const [LEFT, RIGHT, ABOVE, BELOW] = [58, 10, 14, 18];
const LAST = ["steps/s", "samples/s"]; // after the metrics of the training
const BANDS = { recovered: "dead", restarted: "dead", resumed: "stuck" }; // kind -> colour; the band ends at the event and is `seconds` wide
const SIGNS = { fault: ["✕", "dead"], recovered: ["✓", "healthy"], restarted: ["↻", "healthy"], stalled: ["■", "stuck"], resumed: ["▸", "healthy"] };

export class Charts {
  #model;
  #box = $("charts");
  #charts = new Map(); // name -> {figure, canvas, value, seen}
  #over = "time";
  #hover = null; // share of the width, the same in all charts
  #asked = false;

  constructor(model) {
    this.#model = model;
    $("over-time").addEventListener("click", () => this.over("time"));
    $("over-steps").addEventListener("click", () => this.over("steps"));
    new ResizeObserver(() => this.#ask()).observe(this.#box);
    onTheme(() => this.#ask());
  }

  over(axis) {
    this.#over = axis ?? (this.#over === "time" ? "steps" : "time");
    press($("over-time"), this.#over === "time");
    press($("over-steps"), this.#over === "steps");
    this.#ask();
  }

  update(changes) {
    if (changes.whole) this.#forget();
    for (const name of changes.curves) if (!this.#charts.has(name)) this.#make(name);
    if (changes.whole) this.#empty();
    if (changes.curves.size || (changes.events && this.#over === "time")) this.#draw();
  }

  #forget() {
    for (const [name, chart] of this.#charts) {
      if (this.#model.curves.has(name)) continue;
      chart.figure.remove();
      this.#charts.delete(name);
    }
  }

  #empty() {
    this.#box.querySelector(".nothing")?.remove();
    if (!this.#charts.size) this.#box.append(el("p", { class: "nothing", text: "no steps yet" }));
  }

  #make(name) {
    const canvas = el("canvas", { role: "img", "aria-label": name });
    const value = el("span", { class: "value" });
    const figure = el("figure", { "data-curve": name }, el("figcaption", {}, el("b", { text: name }), value), canvas);
    const seen = observeVisible(figure, () => this.#ask());
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      this.#hover = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
      this.#ask();
    });
    canvas.addEventListener("pointerleave", () => {
      this.#hover = null;
      this.#ask();
    });
    this.#charts.set(name, { name, figure, canvas, value, seen });
    this.#empty();
    const place = (chart) => (chart.name === "loss" ? -1 : LAST.indexOf(chart.name) + 1);
    this.#box.append(...[...this.#charts.values()].sort((one, other) => place(one) - place(other)).map((chart) => chart.figure));
  }

  #ask() {
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => {
      this.#asked = false;
      this.#draw();
    });
  }

  #draw() {
    const charts = [...this.#charts.values()].filter((chart) => chart.seen.now);
    const widths = charts.map((chart) => chart.figure.clientWidth - 28); // without the padding; read all widths first: alternating reads and writes is slow
    charts.forEach((chart, place) => this.#one(chart, widths[place]));
  }

  #one({ name, canvas, value }, width) {
    const points = this.#model.curves.get(name) ?? [];
    if (!points.length || width < 80) return;
    const pen = fit(canvas, width, HEIGHT);
    pen.font = FONT;
    pen.textBaseline = "middle";
    const timely = this.#over === "time";
    const along = timely ? 1 : 0;
    const since = this.#model.head.started;
    let from = timely ? Math.min(since, points[0][1]) : points[0][0];
    let to = Math.max(timely ? (this.#model.ended ? this.#model.head.ended : this.#model.head.now) : 0, from + 1);
    let [low, high] = [Infinity, -Infinity];
    for (const point of points) {
      from = Math.min(from, point[along]); // after a restart, steps are computed again
      to = Math.max(to, point[along]);
      low = Math.min(low, point[2]);
      high = Math.max(high, point[2]);
    }
    if (LAST.includes(name)) low = 0; // rates start at zero
    if (high - low < 1e-9 * Math.max(1, Math.abs(high))) [low, high] = low === 0 ? [0, 1] : [low - 0.5, high + 0.5];
    const x = (place) => LEFT + ((place - from) / (to - from)) * (width - LEFT - RIGHT);
    const y = (height) => HEIGHT - BELOW - ((height - low) / (high - low)) * (HEIGHT - ABOVE - BELOW);

    this.#scales(pen, { x, y, from, to, low, high, width, timely, since });
    if (timely) this.#costs(pen, { x, from, to });
    this.#line(pen, points, along, x, y);
    this.#reading({ pen, canvas, value, name, points, along, x, y, from, to, timely, since });
  }

  #scales(pen, { x, y, from, to, low, high, width, timely, since }) {
    pen.textAlign = "right";
    let marks = ticks(low, high, 4);
    if (marks.length < 3) marks = ticks(low, high, 8);
    // As many digits as distinguish two ticks.
    const size = Math.log10(Math.max(...marks.map(Math.abs))) - Math.log10(marks[1] - marks[0]);
    const digits = Math.min(9, Math.max(3, Math.ceil(size + 1e-9) + 1)) || 3;
    for (const tick of marks) {
      pen.fillStyle = colour("line");
      pen.fillRect(LEFT, Math.round(y(tick)), width - LEFT - RIGHT, 1);
      pen.fillStyle = colour("soft");
      pen.fillText(short(Math.abs(tick) < (high - low) * 1e-9 ? 0 : tick, digits), LEFT - 6, y(tick));
    }
    const pitch = timely ? timeStep(to - from, width - LEFT) : ticks(from, to, Math.max(2, width / 110)).slice(0, 2).reduce((a, b) => b - a, 0);
    const step = timely ? pitch : Math.max(1, pitch); // whole steps
    const zero = timely ? since : 0;
    for (let number = Math.ceil((from - zero) / step); zero + number * step <= to; number++) {
      const at = x(zero + number * step);
      pen.fillStyle = colour("soft");
      pen.textAlign = at > width - 26 ? "right" : at < LEFT + 12 ? "left" : "center";
      pen.fillText(timely ? offset(number * step) : count(Math.round(number * step)), at, HEIGHT - BELOW / 2);
    }
  }

  // Lost time as bands, events as symbols.
  #costs(pen, { x, from, to }) {
    let room = 0; // x of the next symbol: a recovery often follows its fault closely
    for (const one of this.#model.events) {
      if (one.time < from || one.time > to) continue;
      if (BANDS[one.kind] && one.seconds) {
        pen.globalAlpha = 0.16;
        pen.fillStyle = colour(BANDS[one.kind]);
        pen.fillRect(x(one.time - one.seconds), ABOVE, Math.max(1.5, x(one.time) - x(one.time - one.seconds)), HEIGHT - ABOVE - BELOW);
        pen.globalAlpha = 1;
      }
      const sign = SIGNS[one.kind];
      if (!sign) continue;
      pen.fillStyle = colour(sign[1]);
      pen.textAlign = "center";
      pen.fillRect(Math.round(x(one.time)), ABOVE, 1, HEIGHT - ABOVE - BELOW);
      room = Math.max(room + 10, x(one.time));
      pen.fillText(sign[0], room, ABOVE / 2);
    }
  }

  #line(pen, points, along, x, y) {
    pen.beginPath();
    let last = -Infinity;
    for (const point of points) {
      // Steps that are computed again start a new line.
      if (point[along] < last) pen.moveTo(x(point[along]), y(point[2]));
      else pen.lineTo(x(point[along]), y(point[2]));
      last = point[along];
    }
    pen.strokeStyle = colour("curve");
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    pen.stroke();
    const newest = points.at(-1);
    pen.fillStyle = colour("curve");
    pen.beginPath();
    pen.arc(x(newest[along]), y(newest[2]), 2.75, 0, 7);
    pen.fill();
  }

  #reading({ pen, canvas, value, name, points, along, x, y, from, to, timely, since }) {
    let point = points.at(-1);
    if (this.#hover !== null) {
      point = nearest(points, along, from + this.#hover * (to - from));
      pen.fillStyle = colour("accent");
      pen.fillRect(x(point[along]), ABOVE, 1, HEIGHT - ABOVE - BELOW);
      pen.beginPath();
      pen.arc(x(point[along]), y(point[2]), 4, 0, 7);
      pen.fill();
    }
    const where = this.#hover === null ? "" : timely ? ` at ${offset(point[1] - since)}` : ` at step ${count(point[0])}`;
    say(value, measure(point[2]) + where);
    const spoken = `${name} over ${this.#over}: ${measure(points.at(-1)[2])} at step ${points.at(-1)[0]}`;
    if (canvas.getAttribute("aria-label") !== spoken) canvas.setAttribute("aria-label", spoken);
  }
}

function nearest(points, along, wanted) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][along] < wanted) low = middle + 1;
    else high = middle;
  }
  const before = points[Math.max(0, low - 1)];
  return Math.abs(before[along] - wanted) < Math.abs(points[low][along] - wanted) ? before : points[low];
}
