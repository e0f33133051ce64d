// The list of runs of this machine: live and ended, to filter, open, compare and delete.

import { commitOf, parameters } from "./views/about.js";
import { Comparison } from "./views/compare.js";
import { $, el, press, say } from "./common/dom.js";
import { count, measure, span } from "./common/format.js";
import { Server } from "./live.js";
import { startTheme } from "./common/theme.js";

const EVERY = 2000; // milliseconds between two requests
const SIGNS = { running: "●", done: "✓", stopped: "□", failed: "✕", killed: "✕", elsewhere: "◌" };
const MOST = 8; // runs that are compared at a time
const WORDS = 160; // characters of a cell

const COLUMNS = [
  // class, title, text, what it is sorted by
  ["name", "run", (run) => run.name, (run) => run.name],
  ["state", "state", (run) => `${SIGNS[run.kind] ?? "?"} ${run.state}`, (run) => run.state],
  ["started", "started", (run) => when(run.started), (run) => run.started],
  ["lasted", "for", (run, now) => lasted(run, now), (run) => (run.ended ?? Infinity) - run.started],
  ["number", "ranks", (run) => count(run.ranks), (run) => run.ranks],
  ["number", "step", (run) => (run.step === null ? "–" : count(run.step)), (run) => run.step ?? -1],
  ["number", "loss", (run) => (run.loss === null ? "–" : measure(run.loss)), (run) => run.loss ?? Infinity],
  ["commit", "commit", (run) => commitOf(run.metadata) || "–", (run) => commitOf(run.metadata)],
  ["what", "hyperparameters", (run) => cut(what(run)), (run) => what(run)],
];

const server = new Server();
const comparison = new Comparison(server, () => runs);
let runs = []; // from the server
let now = 0; // its time
let only = null; // a kind
let sorted = { place: 2, down: true };
const ticked = new Set(); // keys
const rows = new Map(); // key -> {element, box, cells}

function when(time) {
  const date = new Date(time * 1000);
  const day = date.toDateString() === new Date().toDateString() ? "" : `${date.toLocaleDateString("en-CA")} `;
  return day + date.toLocaleTimeString("en-GB");
}

function lasted(run, now) {
  if (run.ended !== null) return span(run.ended - run.started);
  return run.kind === "running" ? span(now - run.started) : "?";
}

function what(run) {
  const found = parameters(run.metadata).map(([name, value]) => `${name}=${value}`);
  return [found.join(" ") || run.command, run.why].filter(Boolean).join(" · ");
}

const cut = (text) => (text.length > WORDS ? `${text.slice(0, WORDS - 1)}…` : text);

// All words have to be somewhere in the run.
function matches(run, words) {
  const { metadata } = run;
  const text = [run.name, metadata?.name, run.state, run.command, run.why, run.host, run.folder, metadata?.git?.commit, metadata?.git?.branch, what(run)];
  const all = text.filter(Boolean).join(" ").toLowerCase();
  return words.every((word) => all.includes(word));
}

function shown() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const by = COLUMNS[sorted.place][3];
  const found = runs.filter((run) => (!only || run.kind === only) && matches(run, words));
  const order = (one, other) => (by(one) < by(other) ? -1 : by(one) > by(other) ? 1 : 0);
  return found.sort((one, other) => (sorted.down ? order(other, one) : order(one, other)));
}

function draw() {
  const visible = shown();
  const keys = new Set(runs.map((run) => run.key));
  for (const [key, row] of rows) {
    if (keys.has(key)) continue;
    row.element.remove();
    rows.delete(key);
    ticked.delete(key);
  }
  const elements = visible.map((run) => paint(run));
  const body = $("rows");
  const same = elements.length === body.children.length && elements.every((element, place) => body.children[place] === element);
  if (!same) body.replaceChildren(...elements);
  $("nothing").hidden = visible.length > 0;
  say($("nothing"), runs.length ? "no run matches the filter" : "no runs yet: phalanx run train.py");
  chips();
  buttons();
}

function paint(run) {
  let row = rows.get(run.key);
  if (!row) rows.set(run.key, (row = make(run)));
  COLUMNS.forEach(([, , text], place) => say(row.cells[place], text(run, now)));
  const last = row.cells.at(-1);
  if (last.title !== run.command) last.title = run.command;
  if (row.element.dataset.kind !== run.kind) row.element.dataset.kind = run.kind;
  if (row.box.checked !== ticked.has(run.key)) row.box.checked = ticked.has(run.key);
  return row.element;
}

function make(run) {
  const box = el("input", { type: "checkbox", "aria-label": `tick ${run.name}` });
  box.addEventListener("change", () => {
    if (box.checked) ticked.add(run.key);
    else ticked.delete(run.key);
    buttons();
  });
  const cells = COLUMNS.map(([name], place) => (place ? el("td", { class: name }) : el("a", { href: `run?run=${encodeURIComponent(run.key)}` })));
  const element = el("tr", { "data-key": run.key }, el("td", { class: "tick" }, box), el("td", { class: "name" }, cells[0]), ...cells.slice(1));
  return { element, box, cells };
}

function chips() {
  const counts = new Map();
  for (const run of runs) counts.set(run.kind, (counts.get(run.kind) ?? 0) + 1);
  if (only && !counts.has(only)) only = null;
  const wanted = Object.keys(SIGNS).filter((kind) => counts.has(kind));
  const box = $("kinds");
  if (wanted.join() !== [...box.children].map((chip) => chip.dataset.kind).join()) {
    box.replaceChildren(
      ...wanted.map((kind) => {
        const chip = el("button", { type: "button", "data-kind": kind });
        chip.addEventListener("click", () => {
          only = only === kind ? null : kind;
          draw();
        });
        return chip;
      }),
    );
  }
  for (const chip of box.children) {
    say(chip, `${SIGNS[chip.dataset.kind]} ${counts.get(chip.dataset.kind)} ${chip.dataset.kind}`);
    press(chip, only === chip.dataset.kind);
  }
}

const chosen = () => runs.filter((run) => ticked.has(run.key));

function buttons() {
  const found = chosen();
  say($("ticked"), found.length ? `${found.length} ticked` : "");
  $("compare").disabled = found.length < 2 || found.length > MOST;
  $("delete").disabled = !found.length || !found.every((run) => run.deletable);
  $("compare").title = found.length > MOST ? `at most ${MOST} runs` : "tick two runs or more";
  $("delete").title = found.every((run) => run.deletable) ? "tick runs that have ended" : "a run that is running, or whose folder is elsewhere, cannot be deleted here";
}

function heads() {
  $("heads").replaceChildren(
    el("th", { class: "tick" }, el("span", { class: "spoken", text: "ticked" })),
    ...COLUMNS.map(([name, title], place) => {
      const button = el("button", { type: "button", text: title + (place === sorted.place ? (sorted.down ? " ↓" : " ↑") : "") });
      button.addEventListener("click", () => {
        sorted = { place, down: sorted.place === place ? !sorted.down : place > 1 };
        heads();
        draw();
      });
      const order = place !== sorted.place ? "none" : sorted.down ? "descending" : "ascending";
      return el("th", { class: name, scope: "col", "aria-sort": order }, button);
    }),
  );
}

async function remove() {
  const found = chosen();
  $("confirm-list").replaceChildren(...found.slice(0, 20).map((run) => el("li", { text: run.name })), ...(found.length > 20 ? [el("li", { text: `and ${found.length - 20} more` })] : []));
  $("confirm").returnValue = "";
  $("confirm").showModal();
  await new Promise((done) => $("confirm").addEventListener("close", done, { once: true }));
  if ($("confirm").returnValue !== "delete") return;
  const errors = [];
  for (const run of found) {
    try {
      await server.post("delete", run.key);
      ticked.delete(run.key);
    } catch (error) {
      errors.push(error.message.trim());
    }
  }
  if (errors.length) tell(errors.join("; "));
  await look();
}

function tell(text) {
  $("notice").hidden = !text;
  say($("notice"), text);
}

async function look() {
  try {
    const answer = await server.json("runs");
    ({ runs, now } = answer);
    say($("where"), `on ${answer.host}`);
    document.title = `${count(runs.length)} runs · phalanx`;
    if ($("notice").dataset.status === "lost") tell("");
    $("notice").dataset.status = "";
    $("denied").hidden = true;
    $("view").hidden = false;
    draw();
    return true;
  } catch (error) {
    if (error.status === 401 || error.status === 403) {
      $("view").hidden = true;
      $("denied").hidden = false;
      return false;
    }
    $("notice").dataset.status = "lost";
    tell("No answer from phalanx ui. This is the last known state; trying again …");
    return true;
  }
}

async function follow() {
  for (;;) {
    if (document.visibilityState === "visible") {
      if (!(await look())) return;
      await comparison.refresh();
    }
    await new Promise((done) => setTimeout(done, EVERY));
  }
}

startTheme();
heads();
$("filter").addEventListener("input", draw);
$("compare").addEventListener("click", () => comparison.show(chosen().map((run) => run.key)));
$("delete").addEventListener("click", remove);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  $("filter").focus();
});
addEventListener("hashchange", () => location.hash.length > 1 && location.reload());
try {
  await server.enter();
} catch {} // no connection: the list says so
follow();
