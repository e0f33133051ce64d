// What happened, the newest first; and the verdicts that stand.

import { $, el } from "./dom.js";
import { clock, KIND, offset, ranges } from "./words.js";

const MOST = 200; // lines

export class Story {
  #model;
  #choose;
  #stacks;
  #last = null; // the newest that is shown

  constructor(model, choose, stacks) {
    this.#model = model;
    this.#choose = choose;
    this.#stacks = stacks;
  }

  update(changes) {
    if (changes.verdicts) this.#verdicts();
    if (changes.told) this.#told(changes.whole);
  }

  #told(whole) {
    const { told } = this.#model;
    const list = $("told");
    const from = whole ? 0 : told.lastIndexOf(this.#last) + 1;
    if (whole || !from) list.replaceChildren();
    for (const one of told.slice(Math.max(from, told.length - MOST))) list.prepend(this.#line(one));
    while (list.children.length > MOST) list.lastElementChild.remove();
    this.#last = told.at(-1) ?? null;
    if (!told.length) list.append(el("li", { class: "nothing", text: "nothing yet: that is good" }));
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
