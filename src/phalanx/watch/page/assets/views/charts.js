// All curves of a run, or of several that are compared: over time or steps, smoothed, on a logarithmic scale.

import { $, el, press, say, observeVisible } from "../common/dom.js";
import { count, measure, offset } from "../common/format.js";
import { LEFT, plot, RIGHT } from "../common/plot.js";
import { saveCsv, savePng } from "../common/save.js";
import { onTheme } from "../common/theme.js";

export const RATES = ["steps/s", "samples/s"]; // after the metrics of the training
const USE = /^(CPU cores, all ranks|memory GiB, all ranks|GPU %, mean|GPU memory GiB, largest rank)$/; // last: watch/model/resources.py

export class Charts {
  #data;
  #box = $("charts");
  #charts = new Map(); // name -> {figure, canvas, value, seen}
  #over;
  #log = false;
  #smooth = 0;
  #hover = null; // share of the width, the same in all charts
  #asked = false;

  // data: {names(), series(name), since(), until(), events(), file()}. series: [{name, points, colour}]
  constructor(data, over = "time") {
    this.#data = data;
    this.#over = over;
    $("over-time").addEventListener("click", () => this.over("time"));
    $("over-steps").addEventListener("click", () => this.over("steps"));
    $("log-scale").addEventListener("click", () => this.log());
    $("smooth").addEventListener("input", () => {
      this.#smooth = Number($("smooth").value);
      this.#ask();
    });
    $("save-csv").addEventListener("click", () => saveCsv(data.file(), this.#all(), data.since()));
    $("save-png").addEventListener("click", () => savePng(data.file(), this.#all()));
    new ResizeObserver(() => this.#ask()).observe(this.#box);
    onTheme(() => this.#ask());
    this.over(over);
  }

  over(axis) {
    this.#over = axis ?? (this.#over === "time" ? "steps" : "time");
    press($("over-time"), this.#over === "time");
    press($("over-steps"), this.#over === "steps");
    this.#ask();
  }

  log() {
    this.#log = !this.#log;
    press($("log-scale"), this.#log);
    this.#ask();
  }

  get axis() {
    return this.#over;
  }

  // Draws what is there now.
  update() {
    const names = this.#data.names();
    const known = new Set(names);
    for (const [name, chart] of this.#charts) {
      if (known.has(name)) continue;
      chart.figure.remove();
      this.#charts.delete(name);
    }
    let added = false;
    for (const name of names) {
      if (this.#charts.has(name)) continue;
      this.#make(name);
      added = true;
    }
    if (added) this.#box.append(...this.#ordered().map((chart) => chart.figure));
    this.#box.querySelector(".nothing")?.remove();
    if (!this.#charts.size) this.#box.append(el("p", { class: "nothing", text: "no steps yet" }));
    this.#draw();
  }

  #ordered() {
    const place = ({ name }) => (name === "loss" ? -1 : USE.test(name) ? RATES.length + 1 : RATES.indexOf(name) + 1);
    return [...this.#charts.values()].sort((one, other) => place(one) - place(other));
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

  #chart(name) {
    return {
      name,
      series: this.#data.series(name),
      over: this.#over,
      since: this.#data.since(),
      until: this.#data.until(),
      zero: RATES.includes(name) || USE.test(name), // rates start at zero
      log: this.#log,
      smooth: this.#smooth,
      events: this.#data.events(),
      hover: this.#hover,
    };
  }

  #all() {
    return this.#ordered().map(({ name }) => this.#chart(name));
  }

  #one({ name, canvas, value }, width) {
    if (width < 80) return;
    const chart = this.#chart(name);
    const points = plot(canvas, width, chart);
    const texts = points.map((point) => (point ? measure(point[2]) : "–"));
    const first = points.find((point) => point);
    const where = this.#hover === null || !first ? "" : this.#over === "time" ? ` at ${offset(first[1] - chart.since)}` : ` at step ${count(first[0])}`;
    if (texts.length === 1) say(value, texts[0] + where);
    else value.replaceChildren(...texts.map((text, place) => el("i", { class: chart.series[place].colour, text })), where);
    const spoken = `${name} over ${this.#over}: ${texts.join(", ")}${first ? ` at step ${first[0]}` : ""}`;
    if (canvas.getAttribute("aria-label") !== spoken) canvas.setAttribute("aria-label", spoken);
  }
}
