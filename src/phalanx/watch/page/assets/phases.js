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
};
export const UNSEEN = ".";
export const WAITING = "w";

export const letterOf = (name) => Object.keys(PHASES).find((letter) => PHASES[letter] === name);
