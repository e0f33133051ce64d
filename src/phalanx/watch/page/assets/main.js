// Puts the page together: updates are folded into the model, and once per frame the views draw what has changed.

import { About } from "./views/about.js";
import { Charts } from "./views/charts.js";
import { $, into } from "./common/dom.js";
import { Events } from "./views/events.js";
import { Grid } from "./views/grid.js";
import { Head } from "./views/head.js";
import { startKeys } from "./views/keys.js";
import { embedded, Remote } from "./live.js";
import { Logs } from "./views/logs.js";
import { Changes, SHOWN_DEAD, Model } from "./model.js";
import { Stacks } from "./views/stacks.js";

import { startTheme, toggleTheme } from "./common/theme.js";
import { Timeline } from "./views/timeline.js";
import { Topology } from "./views/topology.js";

// For tests and benchmarks: milliseconds from an event to the frame that shows it, and to the first frame.
const phalanx = { latency: [], firstPaint: null, status: "" };
window.phalanx = phalanx;
const LATENCIES = 1000;

startTheme();
const source = embedded() ?? new Remote();
const model = new Model();
model.finished = source.report;
let changes = new Changes();
let asked = false;
let times = []; // of the updates that the next frame shows
let views = [];

const curves = {
  names: () => [...model.curves.keys()],
  series: (name) => [{ name: model.head.run, points: model.curves.get(name) ?? [], colour: "curve" }],
  since: () => model.head.started,
  until: () => (model.ended ? model.head.ended : model.head.now),
  events: () => model.events,
  file: () => model.head.run,
};

function choose(rank) {
  if (!model.ranks.has(rank)) return;
  model.chosen = rank;
  changes.chosen = true;
  ask();
}

function begin() {
  const stacks = new Stacks(model, source);
  const grid = new Grid(model, choose);
  const timeline = new Timeline(model, choose);
  const charts = new Charts(curves);
  const drawCharts = {
    update: (now) => {
      if (now.whole || now.curves.size || (now.events && charts.axis === "time")) charts.update();
    },
  };
  const logs = new Logs(model, source, choose);
  const events = new Events(model, choose, () => stacks.ask(true));
  views = [new Head(model), new About(model), events, grid, timeline, drawCharts, new Topology(model, choose), stacks, logs];
  startKeys({
    step: (by) => grid.step(by),
    output: () => logs.show(),
    search: () => logs.find(),
    stacks: () => stacks.ask(true),
    pan: (by) => timeline.pan(by),
    zoom: (factor) => timeline.zoom(factor),
    live: () => timeline.live(),
    axis: () => charts.over(),
    log: () => charts.log(),
    theme: toggleTheme,
    leave: () => {
      document.activeElement?.blur();
      stacks.close();
    },
  });
  $("all-runs").hidden = !source.several;
  $("denied").hidden = true;
  $("view").hidden = false;
}

function receive(update, whole) {
  model.apply(update, whole, changes);
  if (!whole && times.length < LATENCIES) times.push(update.at); // a hidden tab has no frames
  if (!model.ranks.has(model.chosen) && model.order.length) {
    model.chosen = model.order[0];
    changes.chosen = true;
  }
  ask();
}

function ask() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(draw);
}

function draw() {
  asked = false;
  if (!views.length) begin();
  const [now, shown] = [changes, times];
  changes = new Changes();
  times = [];
  for (const view of views) view.update(now);
  for (const rank of now.died) setTimeout(revive, SHOWN_DEAD * 1000, rank);
  if (now.head && model.ended) status(phalanx.status);
  after(() => {
    const time = performance.timeOrigin + performance.now();
    phalanx.firstPaint ??= performance.now();
    phalanx.latency.push(...shown.map((at) => time - at * 1000));
    phalanx.latency.splice(0, phalanx.latency.length - LATENCIES);
  });
}

function revive(rank) {
  model.revive(rank, changes);
  ask();
}

// Runs `what` after the frame is painted.
function after(what) {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => {
    port1.close();
    what();
  };
  port2.postMessage(null);
}

function status(now) {
  if (now === phalanx.status && now === "open" && !model.ended) return; // at every update
  phalanx.status = now;
  const notice = $("notice");
  notice.dataset.status = model.ended ? "ended" : now;
  if (now === "denied" && !model.head) {
    $("view").hidden = true;
    $("denied").hidden = false;
  }
  if (model.ended) {
    const { state, ending, code } = model.head;
    const how = state === "stopped" ? `was ${ending}` : code ? `failed with exit code ${code}` : "succeeded";
    notice.textContent = source.report ? `This run ${how}.` : `The run ${how}. This is its last state.`;
  } else if (source.report) {
    notice.textContent = "The end of this run was not recorded. This is its last state.";
  } else if (now === "lost") {
    notice.textContent = "Connection lost. This is the last known state; reconnecting …";
  } else if (now === "quiet" || now === "denied") {
    // Denied after it was allowed: another run uses this port now.
    notice.textContent = "No more updates from this run. This is its last state.";
  }
  notice.hidden = !model.head || !(model.ended || source.report || now === "quiet" || now === "denied" || now === "lost");
}

// A new link in the same tab changes only the fragment, which does not reload the page.
addEventListener("hashchange", () => location.hash.length > 1 && location.reload());
source.follow(receive, status, () => model.ended);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  into($("ranks"));
  $("grid").focus({ preventScroll: true });
});
