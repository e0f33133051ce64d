// Light or dark: as the system is set, until the user chooses. And the colours for canvases.

import { $ } from "./dom.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
let known = new Map();

export function colour(name) {
  let found = known.get(name);
  if (found === undefined) {
    // A canvas cannot read var(): an element can.
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    found = getComputedStyle(probe).color;
    probe.remove();
    known.set(name, found);
  }
  return found;
}

export function onTheme(listener) {
  listeners.push(listener);
}

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : dark.matches;
};

export function toggleTheme() {
  const chosen = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  remember(chosen);
  changed();
}

export function startTheme() {
  const chosen = remembered();
  if (chosen) document.documentElement.dataset.theme = chosen;
  dark.addEventListener("change", changed);
  $("theme").addEventListener("click", toggleTheme);
  changed();
}

function changed() {
  known = new Map();
  $("theme").textContent = isDark() ? "Light" : "Dark";
  for (const listener of listeners) listener();
}

// There may be no storage: in a file, or in a private window.
function remember(chosen) {
  try {
    localStorage.setItem("phalanx-theme", chosen);
  } catch {}
}

function remembered() {
  try {
    const chosen = localStorage.getItem("phalanx-theme");
    return chosen === "light" || chosen === "dark" ? chosen : null;
  } catch {
    return null;
  }
}
