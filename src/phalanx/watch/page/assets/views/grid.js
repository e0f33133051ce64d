// One row per rank. Only visible rows exist as elements: 512 ranks scroll as smoothly as four.

import { $, el, press, say } from "../common/dom.js";
import { bytes, count, HEALTH, percent, rate } from "../common/format.js";

const GONE = new Set(["done", "stopped", "dead"]); // their last phase means little
const COLUMNS = [
  ["rank", "rank", (v) => String(v.rank)],
  ["health", "health", (v) => `${HEALTH[v.health]?.[1] ?? "?"} ${HEALTH[v.health]?.[0] ?? v.health}`],
  ["where", "node, device", (v) => (v.host || `node ${v.node}`) + (v.device ? ` · ${v.device}` : "")],
  ["phase", "phase", (v) => (GONE.has(v.health) ? "–" : v.phase)],
  ["step", "step", (v) => count(v.step)],
  ["rate", "steps/s", (v) => rate(v.rate)],
  ["samples", "samples/s", (v) => rate(v.samples)],
  ["bars", "data · compute · wait", null],
  ["memory", "memory", (v) => bytes(v.memory)],
  ["gpu", "GPU", (v) => (v.gpu >= 0 || v.gpuMemory ? `${percent(v.gpu)} · ${bytes(v.gpuMemory, 0)}` : "–")],
  ["place", "at", (v) => (v.silent >= 2 ? `no heartbeat for ${v.silent.toFixed(0)} s · ${v.place}` : v.place)],
];
const SHARES = ["data", "compute", "waiting"];
const SPARE = 6; // extra rows above and below the visible ones

export class Grid {
  #model;
  #choose;
  #scroller = $("grid");
  #space = el("div", { class: "space", role: "rowgroup" });
  #rows = new Map(); // place in the list -> row
  #pool = [];
  #shown = []; // ranks, as filtered
  #place = new Map(); // rank -> place in the list
  #only = null; // a health
  #height = 30;
  #asked = false;

  constructor(model, choose) {
    this.#model = model;
    this.#choose = choose;
    this.#scroller.append(this.#space);
    $("columns").append(...COLUMNS.map(([name, title]) => el("span", { class: name, text: title })));
    this.#scroller.addEventListener("scroll", () => this.#ask(), { passive: true });
    this.#scroller.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) choose(Number(row.dataset.rank));
    });
    new ResizeObserver(() => this.#ask(true)).observe(this.#scroller);
  }

  update(changes) {
    if (changes.health) this.#chips();
    if (changes.placement || (this.#only && changes.health)) this.#list();
    else if (changes.ranks.size || changes.chosen) {
      for (const row of this.#rows.values()) {
        if (changes.chosen || changes.ranks.has(row.rank)) this.#paint(row);
      }
    }
    if (changes.chosen) this.#reveal();
  }

  // The next rank in the list as it is shown.
  step(by) {
    const place = this.#place.get(this.#model.chosen) ?? -1;
    const next = Math.max(0, Math.min(this.#shown.length - 1, place + by));
    if (this.#shown.length) this.#choose(this.#shown[next]);
  }

  #list() {
    const { order, ranks } = this.#model;
    this.#shown = this.#only ? order.filter((rank) => ranks.get(rank).health === this.#only) : order;
    this.#place = new Map(this.#shown.map((rank, place) => [rank, place]));
    this.#scroller.setAttribute("aria-rowcount", String(this.#shown.length));
    this.#layout(true);
  }

  #ask(measure = false) {
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => {
      this.#asked = false;
      this.#layout(measure);
    });
  }

  #layout(measure) {
    if (measure) {
      this.#height = parseFloat(getComputedStyle(this.#scroller).getPropertyValue("--row")) || 30;
      this.#space.style.height = `${this.#shown.length * this.#height}px`;
      this.#scroller.style.setProperty("--rows", String(Math.max(1, this.#shown.length)));
    }
    const top = this.#scroller.scrollTop;
    const first = Math.max(0, Math.floor(top / this.#height) - SPARE);
    const last = Math.min(this.#shown.length - 1, Math.ceil((top + this.#scroller.clientHeight) / this.#height) + SPARE);
    for (const [place, row] of this.#rows) {
      if (place < first || place > last) {
        this.#rows.delete(place);
        this.#pool.push(row);
      }
    }
    for (let place = first; place <= last; place++) {
      let row = this.#rows.get(place);
      if (!row) {
        row = this.#pool.pop() ?? this.#make();
        this.#rows.set(place, row);
        row.element.hidden = false;
      } else if (!measure) continue;
      row.rank = this.#shown[place];
      row.element.style.transform = `translateY(${place * this.#height}px)`;
      row.element.setAttribute("aria-rowindex", String(place + 1));
      row.element.id = `rank-${row.rank}`;
      this.#paint(row);
    }
    for (const row of this.#pool) {
      if (!row.element.hidden) row.element.hidden = true;
      row.element.removeAttribute("id");
      row.rank = -1;
    }
    this.#active();
  }

  #make() {
    const cells = {};
    const element = el("div", { class: "row rank", role: "row" });
    for (const [name] of COLUMNS) {
      cells[name] = el("span", { class: name, role: "gridcell" });
      element.append(cells[name]);
    }
    const shares = SHARES.map((name) => el("i", { class: name }));
    cells.bars.append(el("b", { class: "shares", "aria-hidden": "true" }, ...shares), el("span", { class: "spoken" }));
    this.#space.append(element);
    return { element, cells, shares, spoken: cells.bars.lastElementChild, rank: -1 };
  }

  #paint(row) {
    const view = this.#model.ranks.get(row.rank);
    if (!view) return;
    const { element, cells } = row;
    const rank = String(view.rank);
    if (element.dataset.rank !== rank) element.dataset.rank = rank;
    if (element.dataset.health !== view.health) element.dataset.health = view.health;
    const chosen = String(view.rank === this.#model.chosen);
    if (element.getAttribute("aria-selected") !== chosen) element.setAttribute("aria-selected", chosen);
    for (const [name, , text] of COLUMNS) if (text) say(cells[name], text(view));
    const phase = GONE.has(view.health) ? "" : view.phase;
    if (cells.phase.dataset.phase !== phase) cells.phase.dataset.phase = phase;
    if (cells.place.title !== view.place) cells.place.title = view.place;
    SHARES.forEach((name, place) => {
      const width = `${Math.round(Math.min(1, Math.max(0, view[name])) * 100)}%`;
      if (row.shares[place].style.width !== width) row.shares[place].style.width = width;
    });
    const spoken = `data ${percent(view.data)}, compute ${percent(view.compute)}, wait ${percent(view.waiting)}`;
    if (row.spoken.textContent !== spoken) {
      row.spoken.textContent = spoken;
      cells.bars.title = spoken;
    }
  }

  #reveal() {
    const place = this.#place.get(this.#model.chosen);
    if (place === undefined) return;
    const top = place * this.#height;
    const { scrollTop, clientHeight } = this.#scroller;
    if (top < scrollTop) this.#scroller.scrollTop = top;
    else if (top + this.#height > scrollTop + clientHeight) this.#scroller.scrollTop = top + this.#height - clientHeight;
    this.#layout(false);
  }

  #active() {
    const id = `rank-${this.#model.chosen}`;
    if ($(id)) this.#scroller.setAttribute("aria-activedescendant", id);
    else this.#scroller.removeAttribute("aria-activedescendant");
  }

  // Ranks per health: a legend and a filter.
  #chips() {
    const counts = new Map();
    for (const view of this.#model.ranks.values()) counts.set(view.health, (counts.get(view.health) ?? 0) + 1);
    if (this.#only && !counts.has(this.#only)) this.#only = null;
    const box = $("healths");
    const wanted = Object.keys(HEALTH).filter((health) => counts.has(health));
    const there = [...box.children].map((chip) => chip.dataset.health);
    if (wanted.join() !== there.join()) {
      // Only if necessary: a button that is being pressed must not be replaced.
      box.replaceChildren(
        ...wanted.map((health) => {
          const chip = el("button", { type: "button", "data-health": health });
          chip.addEventListener("click", () => {
            this.#only = this.#only === health ? null : health;
            this.#scroller.scrollTop = 0;
            this.#chips();
            this.#list();
          });
          return chip;
        }),
      );
    }
    for (const chip of box.children) {
      const [word, sign] = HEALTH[chip.dataset.health];
      say(chip, `${sign} ${counts.get(chip.dataset.health)} ${word}`);
      press(chip, this.#only === chip.dataset.health);
    }
  }
}
