// Keyboard shortcuts.

import { $, el } from "../common/dom.js";

export function startKeys(actions) {
  const table = [
    [["j", "ArrowDown"], "next rank", () => actions.step(1)],
    [["k", "ArrowUp"], "previous rank", () => actions.step(-1)],
    [["PageDown"], "ten ranks down", () => actions.step(10), "#grid"],
    [["PageUp"], "ten ranks up", () => actions.step(-10), "#grid"],
    [["g", "Home"], "first rank", () => actions.step(-Infinity)],
    [["G", "End"], "last rank", () => actions.step(Infinity)],
    [["Enter", "l"], "log of the rank", actions.output],
    [["/"], "search the logs", actions.search],
    [["s"], "stacks of all ranks", actions.stacks],
    [["ArrowLeft", "h"], "timeline: back", () => actions.pan(-1)],
    [["ArrowRight"], "timeline: forward", () => actions.pan(1)],
    [["+", "="], "timeline: less time", () => actions.zoom(1 / 2)],
    [["-"], "timeline: more time", () => actions.zoom(2)],
    [["f"], "timeline: live", actions.live],
    [["x"], "curves over time or steps", actions.axis],
    [["y"], "curves on a logarithmic scale", actions.log],
    [["t"], "light or dark", actions.theme],
    [["?"], "show keys", () => $("keys").showModal()],
    [["Escape"], "close, leave a field", actions.leave],
  ];
  $("keys-list").append(
    ...table.flatMap(([keys, what]) => [
      el("dt", {}, ...keys.filter((key) => key !== "=").map((key) => el("kbd", { text: NAMES[key] ?? key }))),
      el("dd", { text: what }),
    ]),
  );
  $("help").addEventListener("click", () => $("keys").showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open || $("view").hidden) return;
    const typing = event.target.closest("input, select, textarea");
    if (typing && event.key !== "Escape") return;
    // Keep the native behaviour of keys that scroll or press a button.
    const native = SCROLLING.has(event.key) && event.target.closest("#log, #found, #event-list, #nodes, #stacks-list, #charts");
    if (native || (event.key === "Enter" && event.target.closest("button, a, [role=option]"))) return;
    const found = table.find(([keys, , , where]) => keys.includes(event.key) && (!where || event.target.closest(where)));
    if (!found) return;
    event.preventDefault();
    found[2]();
  });
}

const SCROLLING = new Set(["ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "PageDown", "PageUp", "Home", "End"]);
const NAMES = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", PageDown: "page ↓", PageUp: "page ↑" };
