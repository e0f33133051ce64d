// Stacks side by side: ranks with the same stack share a column; ranks named by a verdict come first.

import { $, el, into, say } from "../common/dom.js";
import { ranges } from "../common/format.js";
import { explained } from "../live.js";

export class Stacks {
  #model;
  #source;
  #texts = ""; // verdicts for which stacks were requested already
  #wanted = false; // requested by the user, not answer of a verdict

  constructor(model, source) {
    this.#model = model;
    this.#source = source;
    $("why").addEventListener("click", () => this.ask(true));
    $("stacks-again").addEventListener("click", () => this.ask(false));
    $("stacks-close").addEventListener("click", () => this.close());
  }

  update(changes) {
    if (!changes.verdicts) return;
    const texts = this.#model.verdicts.map((one) => one.text).join("\n");
    if (texts && texts !== this.#texts) this.#ask();
    if (!texts && !this.#wanted) this.close();
    this.#texts = texts;
  }

  close() {
    $("stacks").hidden = true;
    this.#wanted = false;
  }

  ask(scroll) {
    this.#wanted = true;
    this.#ask();
    if (scroll) into($("stacks"));
  }

  async #ask() {
    $("stacks").hidden = false;
    $("stacks").setAttribute("aria-busy", "true");
    say($("stacks-note"), "asking all ranks …");
    try {
      this.#show(await this.#source.why());
    } catch (error) {
      $("stacks-list").replaceChildren();
      say($("stacks-note"), `no stacks: ${explained(error, this.#model, `phalanx why ${this.#model.head?.run}`)}`);
    }
    $("stacks").setAttribute("aria-busy", "false");
  }

  #show(answer) {
    const named = new Set(this.#model.verdicts.flatMap((one) => one.ranks ?? []));
    const alike = new Map(); // the stack -> ranks
    for (const [rank, stack] of Object.entries(answer.stacks ?? {})) {
      // Ignore numbers of processes and threads, which differ in every rank.
      const key = `${named.has(Number(rank))} ${stack.replace(/\b(0x[0-9a-f]+|pid \d+|process \d+|thread \d+)\b/gi, "")}`;
      const group = alike.get(key) ?? { ranks: [], stack };
      group.ranks.push(Number(rank));
      alike.set(key, group);
    }
    const blame = (group) => (group.ranks.some((rank) => named.has(rank)) ? 0 : 1);
    const groups = [...alike.values()].sort((one, other) => blame(one) - blame(other) || one.ranks[0] - other.ranks[0]);
    $("stacks-list").replaceChildren(
      ...groups.map((group) =>
        el(
          "article",
          { class: blame(group) ? "" : "named" },
          el("h3", { text: `${blame(group) ? "" : "■ "}rank ${ranges(group.ranks)}` }),
          el("pre", { text: group.stack.trimEnd() }),
        ),
      ),
      ...(answer.report ? [el("article", { class: "report" }, el("h3", { text: "report" }), el("pre", { text: answer.report }))] : []),
    );
    const stacks = Object.keys(answer.stacks ?? {}).length;
    say($("stacks-note"), stacks ? `${stacks} ${stacks === 1 ? "rank" : "ranks"} at ${groups.length} ${groups.length === 1 ? "place" : "places"}` : "no stacks");
  }
}
