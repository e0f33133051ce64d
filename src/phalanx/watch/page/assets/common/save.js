// Curves as files: CSV and PNG.

import { el } from "./dom.js";
import { colour } from "./theme.js";
import { HEIGHT, plot } from "./plot.js";

const [WIDTH, MARGIN, TITLE] = [960, 16, 26];
const MOST = 14000; // pixels: browsers limit the height of a canvas to 16384

// charts: [{name, series: [{name, points}]}]; times are given in seconds since `since`.
export function saveCsv(name, charts, since) {
  const rows = [["curve", "run", "step", "seconds", "value"].join(",")];
  for (const chart of charts) {
    for (const one of chart.series) {
      const start = [cell(chart.name), cell(one.name)].join(",");
      for (const [step, time, value] of one.points) rows.push(`${start},${step},${Number((time - since).toFixed(3))},${value}`);
    }
  }
  save(`${name}.csv`, new Blob([rows.join("\n"), "\n"], { type: "text/csv" }));
}

// A spreadsheet takes what begins like this as a formula.
function cell(text) {
  const plain = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

// All charts, one below the other, as they are shown.
export function savePng(name, charts) {
  const high = TITLE + HEIGHT + MARGIN;
  const shown = charts.slice(0, Math.floor(MOST / high / (devicePixelRatio || 1)));
  const scale = devicePixelRatio || 1;
  const sheet = el("canvas", { width: Math.round(WIDTH * scale), height: Math.round((shown.length * high + MARGIN) * scale) });
  const pen = sheet.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = colour("panel");
  pen.fillRect(0, 0, WIDTH, shown.length * high + MARGIN);
  pen.textBaseline = "middle";
  shown.forEach((chart, place) => {
    const top = place * high + MARGIN;
    const part = el("canvas");
    plot(part, WIDTH - 2 * MARGIN, { ...chart, hover: null });
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillStyle = colour("ink");
    pen.fillText(chart.name, MARGIN, top + TITLE / 2);
    let right = WIDTH - MARGIN;
    pen.font = "12px system-ui, sans-serif";
    for (const one of chart.series.length > 1 ? [...chart.series].reverse() : []) {
      right -= pen.measureText(one.name).width;
      pen.fillStyle = colour(one.colour);
      pen.fillText(one.name, right, top + TITLE / 2);
      right -= 16;
    }
    pen.drawImage(part, MARGIN, top + TITLE, WIDTH - 2 * MARGIN, HEIGHT);
  });
  return new Promise((done) => {
    sheet.toBlob((blob) => {
      if (blob) save(`${name}.png`, blob);
      done();
    }, "image/png");
  });
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = el("a", { href: address, download: name.replace(/[^\w.-]+/g, "-") });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
