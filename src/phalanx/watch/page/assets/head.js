// The top of the page: which run, how it is, how far, and who is still missing.

import { $, el, say } from "./dom.js";
import { count, percent, rate, span, STATE, stateOf } from "./words.js";

const FIGURES = [
  // name, value, the small print beneath it
  ["step", (h) => count(h.step), (h) => (h.total ? `of ${count(h.total)}` : h.epoch ? `epoch ${h.epoch}` : "")],
  ["left", (h) => (h.left == null ? "–" : span(h.left)), (h) => (h.total && h.epoch ? `epoch ${h.epoch}` : "")],
  ["up", (h, now) => span(now - h.started), (h) => (h.attempt ? `attempt ${h.attempt + 1}` : "")],
  ["ranks", (h) => count(h.world_size), (h) => (h.nodes === 1 ? "on 1 node" : `on ${count(h.nodes)} nodes`)],
  ["generation", (h) => count(h.generation), (h) => (h.generation ? "group formed anew" : "the first group")],
  ["steps/s", (h) => rate(h.rate), () => ""],
  ["samples/s", (h) => rate(h.samples), () => ""],
  ["goodput", (h) => percent(h.goodput), (h) => (h.lost >= 0.05 ? `${h.lost < 60 ? h.lost.toFixed(1) + " s" : span(h.lost)} lost` : "nothing lost")],
];

export class Head {
  #model;
  #cells = [];

  constructor(model) {
    this.#model = model;
    for (const [name] of FIGURES) {
      const value = el("dd", { class: "value" });
      const note = el("dd", { class: "small" });
      this.#cells.push([value, note]);
      $("figures").append(el("div", {}, el("dt", { text: name }), value, note));
    }
    setInterval(() => this.#figures(), 1000); // the clock goes on by itself
  }

  update(changes) {
    if (changes.head) {
      const { head } = this.#model;
      say($("name"), head.run);
      say($("command"), head.command);
      $("command").title = head.command;
      const state = $("state");
      const now = stateOf(head);
      say(state, STATE[now] ?? now);
      state.dataset.state = now;
      const title = `${STATE[now] ?? now} · ${head.run} · phalanx`;
      if (document.title !== title) document.title = title;
      this.#progress(head);
      this.#figures();
    }
    if (changes.roll) this.#roll();
  }

  #figures() {
    const { head } = this.#model;
    if (!head) return;
    FIGURES.forEach(([, value, note], place) => {
      say(this.#cells[place][0], value(head, this.#model.now));
      say(this.#cells[place][1], note(head));
    });
  }

  #progress(head) {
    const bar = $("progress");
    bar.hidden = !head.total;
    if (!head.total) return;
    const share = Math.min(1, Math.max(0, head.step / head.total));
    bar.firstElementChild.style.transform = `scaleX(${share})`;
    bar.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  }

  #roll() {
    const { roll } = this.#model;
    $("roll").hidden = !roll;
    if (!roll) return;
    const here = roll.here ?? [];
    const missing = roll.missing ?? [];
    say($("roll-text"), roll.text || `${here.length} of ${roll.expected} nodes are here`);
    const nameless = Math.max(0, roll.expected - here.length - missing.length); // it is not known who they are
    $("roll-nodes").replaceChildren(
      ...here.map((host) => el("li", { class: "here", text: `✓ ${host}` })),
      ...missing.map((host) => el("li", { class: "missing", text: `◌ ${host} is missing` })),
      ...(nameless ? [el("li", { class: "missing", text: nameless === 1 ? "◌ one more" : `◌ ${nameless} more` })] : []),
    );
  }
}
