// The phases of a rank: the letters of contract/events.py.

export const PHASES = {
  d: "data",
  f: "forward",
  b: "backward",
  o: "optimizer",
  w: "collective",
  k: "checkpoint",
  c: "compile",
  i: "import",
  j: "join",
  n: "idle",
  s: "sleep",
};
export const UNSEEN = ".";
export const WAITING = "w";
export const SLEEPING = "s";

export const letterOf = (name) => Object.keys(PHASES).find((letter) => PHASES[letter] === name);
