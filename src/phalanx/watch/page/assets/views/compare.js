// Runs over each other: their curves, and a table of what they have reached and how they differ.

import { commitOf, parameters } from "./about.js";
import { Charts } from "./charts.js";
import { $, el, into } from "../common/dom.js";

const EVERY = 4000; // milliseconds, while one of them runs

export class Comparison {
  #server;
  #runs; // a function: all runs of the list
  #keys = [];
  #found = null; // the answer of the server
  #charts = null;
  #asked = 0;
  #live = false; // one of them was running when it was asked

  constructor(server, runs) {
    this.#server = server;
    this.#runs = runs;
    $("comparison-close").addEventListener("click", () => this.#close());
  }

  async show(keys) {
    this.#keys = keys;
    this.#found = null;
    $("comparison").hidden = false;
    await this.#ask();
    into($("comparison"));
  }

  // Called after each look at the list.
  async refresh() {
    if (!this.#keys.length || performance.now() - this.#asked < EVERY) return;
    if (this.#live) await this.#ask(); // once more after the end, too
  }

  #close() {
    this.#keys = [];
    $("comparison").hidden = true;
  }

  #entries() {
    const known = new Map(this.#runs().map((run) => [run.key, run]));
    return this.#keys.map((key) => known.get(key));
  }

  async #ask() {
    const keys = this.#keys;
    this.#asked = performance.now();
    this.#live = this.#entries().some((run) => run?.kind === "running");
    try {
      const found = await this.#server.json(`compare?runs=${keys.map(encodeURIComponent).join(",")}`);
      if (keys !== this.#keys) return; // others were chosen meanwhile
      this.#found = found;
    } catch (error) {
      $("facts").replaceChildren(el("tbody", {}, el("tr", {}, el("td", { text: error.message }))));
      return;
    }
    this.#charts ??= new Charts(this.#data(), "steps");
    this.#legend();
    this.#table();
    this.#charts.update();
  }

  #data() {
    return {
      names: () => Object.keys(this.#found.curves),
      series: (name) => this.#found.curves[name].map((points, place) => ({ name: this.#found.names[place], points, colour: `series-${place}` })),
      since: () => 0,
      until: () => null,
      events: () => [],
      file: () => `compare-${this.#found.names.join("-")}`.slice(0, 120),
    };
  }

  #legend() {
    $("legend").replaceChildren(...this.#found.names.map((name, place) => el("li", {}, el("i", { class: `fill-${place}`, "aria-hidden": "true" }), name)));
  }

  #table() {
    const entries = this.#entries();
    const given = entries.map((run) => new Map([...parameters(run?.metadata), ["commit", commitOf(run?.metadata)], ["command", run?.command ?? ""]]));
    const names = [...new Set(given.flatMap((one) => [...one.keys()]))].filter((name) => given.some((one) => one.get(name)));
    const rows = this.#found.table.map(([name, cells]) => [name, cells.map((one) => one.text + (one.ratio == null ? "" : ` (${one.ratio.toFixed(2)}×)`)), false]);
    for (const name of names) {
      const values = given.map((one) => one.get(name) || "–");
      rows.push([name, values, new Set(values).size > 1]);
    }
    $("facts").replaceChildren(
      el("thead", {}, el("tr", {}, el("th"), ...this.#found.names.map((name, place) => el("th", { scope: "col" }, el("i", { class: `series-${place}`, text: name }))))),
      el("tbody", {}, ...rows.map(([name, values, differs]) => el("tr", differs ? { class: "differs" } : {}, el("th", { scope: "row", text: name }), ...values.map((text) => el("td", { text }))))),
    );
  }
}
