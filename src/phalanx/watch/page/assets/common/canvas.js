// A canvas at the resolution of the screen, a hatch pattern, and the ticks of axes.

export function fit(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// A pattern of diagonal lines, to fill areas with.
export function hatched(pen, ground, line) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const small = tile.getContext("2d");
  small.fillStyle = ground;
  small.fillRect(0, 0, 6, 6);
  small.strokeStyle = line;
  small.beginPath();
  for (const shift of [-6, 0, 6]) {
    small.moveTo(shift, 6);
    small.lineTo(shift + 6, 0);
  }
  small.stroke();
  return pen.createPattern(tile, "repeat");
}

export const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";

const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400];

// Seconds between two labels.
export function timeStep(seconds, width, room = 90) {
  const least = (seconds * room) / Math.max(1, width);
  return STEPS.find((step) => step >= least) ?? Math.ceil(least / 86400) * 86400;
}

// About `wanted` round numbers between two values.
export function ticks(low, high, wanted = 3) {
  const rough = (high - low) / wanted;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const found = [];
  for (let number = Math.ceil(low / step); number * step <= high + step * 1e-6; number++) found.push(number * step);
  return found;
}
