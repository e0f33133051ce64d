// The top of the page: the run, its state and progress, and missing nodes.

import { $, el, say } from "../common/dom.js";
import { count, percent, rate, span, STATE } from "../common/format.js";

const FIGURES = [
  // name, value, note below it
  ["step", (h) => count(h.step), (h) => (h.total ? `of ${count(h.total)}` : epoch(h))],
  ["ETA", (h) => (h.eta == null ? "–" : span(h.eta)), (h) => (h.total ? epoch(h) : "")],
  ["elapsed", (h, now) => span(now - h.started), (h) => (h.attempt ? `attempt ${h.attempt + 1}` : "")],
  ["ranks", (h) => count(h.world_size), (h) => (h.nodes === 1 ? "on 1 node" : h.nodes ? `on ${count(h.nodes)} nodes` : "")],
  ["generation", (h) => count(h.generation), (h) => (h.generation ? "regrouped" : "first group")],
  ["steps/s", (h) => (h.ended != null && !h.rate ? "–" : rate(h.rate)), () => ""],
  ["samples/s", (h) => rate(h.samples), () => ""],
  ["goodput", (h) => (h.step < 0 ? "–" : percent(h.goodput)), (h) => (h.step < 0 ? "no steps yet" : h.lost >= 0.05 ? `${h.lost < 60 ? h.lost.toFixed(1) + " s" : span(h.lost)} lost` : "no time lost")],
];

const INTERPRETER = /^\S*\bpython[\d.]*( -u)? (?=\S)/; // `phalanx ps` leaves it out, too

// As the progress bar in the terminal counts them.
function epoch(head) {
  return head.epoch ? `epoch ${head.epoch}${head.epochs ? `/${head.epochs}` : ""}` : "";
}

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
    setInterval(() => this.#figures(), 1000); // the clock runs between updates
  }

  update(changes) {
    if (changes.head) {
      const { head } = this.#model;
      say($("name"), head.run);
      say($("command"), head.command.replace(INTERPRETER, ""));
      $("command").title = head.command;
      const state = $("state");
      const now = head.ending || (STATE[head.state] ?? head.state);
      say(state, now);
      state.dataset.state = head.state;
      const title = `${now} · ${head.run} · phalanx`;
      if (document.title !== title) document.title = title;
      this.#progress(head);
      this.#figures();
    }
    if (changes.rendezvous) this.#rendezvous();
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

  #rendezvous() {
    const { rendezvous } = this.#model;
    $("rendezvous").hidden = !rendezvous;
    if (!rendezvous) return;
    const joined = rendezvous.joined ?? [];
    const missing = rendezvous.missing ?? [];
    say($("rendezvous-text"), rendezvous.text || `${joined.length} of ${rendezvous.expected} nodes joined`);
    const unnamed = Math.max(0, rendezvous.expected - joined.length - missing.length);
    $("rendezvous-nodes").replaceChildren(
      ...joined.map((host) => el("li", { class: "joined", text: `✓ ${host}` })),
      ...missing.map((host) => el("li", { class: "missing", text: `◌ ${host} is missing` })),
      ...(unnamed ? [el("li", { class: "missing", text: unnamed === 1 ? "◌ one more" : `◌ ${unnamed} more` })] : []),
    );
  }
}
