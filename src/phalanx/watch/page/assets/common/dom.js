// Elements and text. All text of the run is untrusted and never parsed as HTML.

export const $ = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function drawn(tag, properties = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Writes only changes: a browser lays out again after every write.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function press(button, pressed) {
  button.setAttribute("aria-pressed", String(pressed));
}

// Calls `shown` when the element becomes visible; the result says whether it is. What is not visible is not drawn.
export function observeVisible(element, shown) {
  const seen = { now: false };
  new IntersectionObserver((entries) => {
    const now = entries[entries.length - 1].isIntersecting;
    if (now && !seen.now) {
      seen.now = true;
      shown();
    }
    seen.now = now;
  }).observe(element);
  return seen;
}

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export function into(element) {
  element.scrollIntoView({ block: "start", behavior: calm() ? "instant" : "smooth" });
}
