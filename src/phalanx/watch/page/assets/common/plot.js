// One chart on a canvas: curves over steps or time, with what faults and stalls have cost.

import { FONT, fit, timeStep, ticks } from "./canvas.js";
import { colour } from "./theme.js";
import { count, offset, short } from "./format.js";

export const HEIGHT = 132;
export const LEFT = 58;
export const RIGHT = 10;
const [ABOVE, BELOW] = [14, 18];
const CONSTANT = 1e-6; // curves that change less than this, relative to their size, are constant
const BANDS = { recovered: "dead", restarted: "dead", resumed: "stuck" }; // kind -> colour; the band ends at the event and is `seconds` wide
const SIGNS = { fault: ["✕", "dead"], recovered: ["✓", "healthy"], restarted: ["↻", "healthy"], stalled: ["■", "stuck"], resumed: ["▸", "healthy"] };

// Draws a chart, and returns for each curve the point at `hover`, else its newest: [step, time, value] or undefined.
// chart: {series: [{points: [[step, time, value], …], colour}], over: "time" | "steps", since, until: of the time axis,
//         zero: include 0, log, smooth: 0 to 1, events, hover: share of the width or null}
export function plot(canvas, width, chart) {
  const pen = fit(canvas, width, HEIGHT);
  pen.font = FONT;
  pen.textBaseline = "middle";
  const along = chart.over === "time" ? 1 : 0;
  const drawn = chart.series.map((one) => one.points.filter((point) => Number.isFinite(point[2])));
  const field = scaled(drawn, along, width, chart);
  if (!field) return drawn.map(() => undefined);
  scales(pen, field, chart, width);
  if (along) costs(pen, field, chart.events ?? []);
  const smoothed = chart.smooth > 0 ? drawn.map((points) => smooth(points, along, chart.smooth)) : drawn;
  drawn.forEach((points, place) => {
    pen.strokeStyle = pen.fillStyle = colour(chart.series[place].colour);
    if (chart.smooth > 0) {
      pen.globalAlpha = 0.28;
      line(pen, points, along, field, 1);
      pen.globalAlpha = 1;
    }
    line(pen, smoothed[place], along, field, 1.75);
    dot(pen, smoothed[place].at(-1), along, field, 2.75);
  });
  return smoothed.map((points, place) => {
    if (!points.length || chart.hover === null) return points.at(-1);
    const point = nearest(points, along, field.from + chart.hover * (field.to - field.from));
    pen.fillStyle = colour("accent");
    if (!place) pen.fillRect(field.x(point[along]), ABOVE, 1, HEIGHT - ABOVE - BELOW);
    pen.fillStyle = colour(chart.series.length > 1 ? chart.series[place].colour : "accent");
    dot(pen, point, along, field, 4);
    return point;
  });
}

// An exponential moving average. Its first values are not drawn towards zero. It restarts at steps that are computed again.
export function smooth(points, along, weight) {
  let [sum, share, last] = [0, 0, -Infinity];
  return points.map((point) => {
    if (point[along] < last) sum = share = 0;
    last = point[along];
    sum = sum * weight + point[2] * (1 - weight);
    share = share * weight + (1 - weight);
    return [point[0], point[1], sum / share];
  });
}

function scaled(drawn, along, width, { over, since, until, zero, log }) {
  let [from, to, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  let least = Infinity; // above zero
  for (const points of drawn) {
    for (const point of points) {
      from = Math.min(from, point[along]); // after a restart, steps are computed again
      to = Math.max(to, point[along]);
      low = Math.min(low, point[2]);
      high = Math.max(high, point[2]);
      if (point[2] > 0) least = Math.min(least, point[2]);
    }
  }
  if (from === Infinity) return null;
  if (over === "time") [from, to] = [Math.min(since, from), Math.max(until ?? to, to)];
  to = Math.max(to, from + 1);
  const bent = log && high > 0;
  let constant = null;
  if (bent) low = least;
  if (high - low <= CONSTANT * Math.max(Math.abs(low), Math.abs(high))) {
    constant = high;
    [low, high] = bent ? [high / 2, high * 2] : high === 0 ? [0, 1] : [high - Math.abs(high) / 2, high + Math.abs(high) / 2];
  }
  if (zero && !bent) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const value = bent ? Math.log10 : (number) => number;
  const [bottom, top] = [value(low), value(high)];
  return {
    from, to, low, high, constant, bent,
    x: (place) => LEFT + ((place - from) / (to - from)) * (width - LEFT - RIGHT),
    y: (number) => HEIGHT - BELOW - ((value(number) - bottom) / (top - bottom)) * (HEIGHT - ABOVE - BELOW),
  };
}

function marksOf({ low, high, constant, bent }) {
  if (constant !== null) return [constant];
  if (bent) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.ceil((last - first) / 4) || 1;
    const powers = [];
    for (let power = first; power <= last; power += every) powers.push(10 ** power);
    const found = (last - first <= 2 ? powers.flatMap((power) => [power, 2 * power, 5 * power]) : powers).filter((mark) => mark >= low * 0.999 && mark <= high * 1.001);
    if (found.length >= 2) return found;
  }
  const marks = ticks(low, high, 4);
  return marks.length < 3 ? ticks(low, high, 8) : marks;
}

function scales(pen, field, { over, since }, width) {
  const { x, y, from, to, low, high } = field;
  const marks = marksOf(field);
  pen.textAlign = "right";
  // As many digits as distinguish two ticks.
  const range = marks.length > 1 ? Math.log10(Math.max(...marks.map(Math.abs))) - Math.log10(marks[1] - marks[0]) : 3;
  let digits = field.bent ? 2 : Math.min(9, Math.max(3, Math.ceil(range + 1e-9) + 1)) || 3;
  const texts = () => marks.map((tick) => short(!field.bent && Math.abs(tick) < (high - low) * 1e-9 ? 0 : tick, digits));
  while (digits < 9 && new Set(texts()).size < marks.length) digits++;
  while (digits > 1 && texts().some((text) => pen.measureText(text).width > LEFT - 8)) digits--; // no room for more
  marks.forEach((tick, place) => {
    pen.fillStyle = colour("line");
    pen.fillRect(LEFT, Math.round(y(tick)), width - LEFT - RIGHT, 1);
    pen.fillStyle = colour("soft");
    pen.fillText(texts()[place], LEFT - 6, y(tick));
  });
  const timely = over === "time";
  const pitch = timely ? timeStep(to - from, width - LEFT) : ticks(from, to, Math.max(2, width / 110)).slice(0, 2).reduce((a, b) => b - a, 0);
  const step = timely ? pitch : Math.max(1, pitch); // whole steps
  const zero = timely ? since : 0;
  for (let number = Math.ceil((from - zero) / step); zero + number * step <= to; number++) {
    const at = x(zero + number * step);
    pen.fillStyle = colour("soft");
    pen.textAlign = at > width - 26 ? "right" : at < LEFT + 12 ? "left" : "center";
    pen.fillText(timely ? offset(number * step) : count(Math.round(number * step)), at, HEIGHT - BELOW / 2);
  }
}

// Lost time as bands, events as symbols.
function costs(pen, { x, from, to }, events) {
  let room = 0; // x of the next symbol: a recovery often follows its fault closely
  for (const one of events) {
    if (one.time < from || one.time > to) continue;
    if (BANDS[one.kind] && one.seconds) {
      pen.globalAlpha = 0.16;
      pen.fillStyle = colour(BANDS[one.kind]);
      pen.fillRect(x(one.time - one.seconds), ABOVE, Math.max(1.5, x(one.time) - x(one.time - one.seconds)), HEIGHT - ABOVE - BELOW);
      pen.globalAlpha = 1;
    }
    const sign = SIGNS[one.kind];
    if (!sign) continue;
    pen.fillStyle = colour(sign[1]);
    pen.textAlign = "center";
    pen.fillRect(Math.round(x(one.time)), ABOVE, 1, HEIGHT - ABOVE - BELOW);
    room = Math.max(room + 10, x(one.time));
    pen.fillText(sign[0], room, ABOVE / 2);
  }
}

function line(pen, points, along, { x, y, bent }, width) {
  pen.beginPath();
  let last = -Infinity;
  let gap = true;
  for (const point of points) {
    if (bent && !(point[2] > 0)) {
      gap = true; // not on a logarithmic scale
      continue;
    }
    // Steps that are computed again start a new line.
    if (gap || point[along] < last) pen.moveTo(x(point[along]), y(point[2]));
    else pen.lineTo(x(point[along]), y(point[2]));
    gap = false;
    last = point[along];
  }
  pen.lineWidth = width;
  pen.lineJoin = "round";
  pen.stroke();
}

function dot(pen, point, along, { x, y, bent }, radius) {
  if (!point || (bent && !(point[2] > 0))) return;
  pen.beginPath();
  pen.arc(x(point[along]), y(point[2]), radius, 0, 7);
  pen.fill();
}

function nearest(points, along, wanted) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][along] < wanted) low = middle + 1;
    else high = middle;
  }
  const before = points[Math.max(0, low - 1)];
  return Math.abs(before[along] - wanted) < Math.abs(points[low][along] - wanted) ? before : points[low];
}
