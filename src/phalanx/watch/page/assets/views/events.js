// The list of events, newest first, and the current verdicts.

import { $, el } from "../common/dom.js";
import { clock, KIND, offset, ranges } from "../common/format.js";

const MOST = 200; // lines

export class Events {
  #model;
  #choose;
  #stacks;
  #last = null; // the newest event shown

  constructor(model, choose, stacks) {
    this.#model = model;
    this.#choose = choose;
    this.#stacks = stacks;
  }

  update(changes) {
    if (changes.verdicts) this.#verdicts();
    if (changes.events) this.#list(changes.whole);
  }

  #list(whole) {
    const { events } = this.#model;
    const list = $("event-list");
    const from = whole ? 0 : events.lastIndexOf(this.#last) + 1;
    if (whole || !from) list.replaceChildren();
    for (const one of events.slice(Math.max(from, events.length - MOST))) list.prepend(this.#line(one));
    while (list.children.length > MOST) list.lastElementChild.remove();
    this.#last = events.at(-1) ?? null;
    if (!events.length) list.append(el("li", { class: "nothing", text: "no events yet" }));
    else list.querySelector(".nothing")?.remove();
  }

  #line(one) {
    const { head } = this.#model;
    return el(
      "li",
      { "data-kind": one.kind },
      el("span", { class: "sign", text: KIND[one.kind] ?? "·", "aria-hidden": "true" }),
      el("time", { text: offset(one.time - head.started), title: clock(one.time) }),
      el("span", { class: "text" }, el("b", { text: one.kind }), ` ${one.text}`, ...this.#ranks(one)),
    );
  }

  #ranks(one) {
    const ranks = one.ranks ?? [];
    if (!ranks.length) return [];
    const button = el("button", { type: "button", class: "link", text: `rank ${ranges(ranks)}` });
    button.addEventListener("click", () => this.#choose(ranks[0]));
    return [" ", button];
  }

  #verdicts() {
    const { verdicts } = this.#model;
    const box = $("verdicts");
    box.hidden = !verdicts.length;
    box.replaceChildren(
      ...verdicts.map((one) => {
        const stacks = el("button", { type: "button", text: "Stacks" });
        stacks.addEventListener("click", this.#stacks);
        return el("p", {}, el("b", { text: "■ verdict" }), el("span", { text: one.text }), ...this.#ranks(one), stacks);
      }),
    );
  }
}
