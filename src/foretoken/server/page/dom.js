// Helpers that create elements. Strings are always set as text, so that a model's output is never
// markup. And the page's views, and on narrow screens the two sides as drawers.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Return a function that calls `draw` once, `seconds` after the first of several calls. */
export function paced(draw, seconds) {
  let timer = null;
  return () => {
    timer ??= setTimeout(() => {
      timer = null;
      draw();
    }, seconds * 1000);
  };
}

const { body } = document;

/** changed: called when another view is chosen. */
export function followViews(fieldset, changed) {
  const tell = () => {
    body.dataset.view = fieldset.querySelector(":checked").value;
    changed();
  };
  fieldset.addEventListener("change", tell);
  tell();
}

const openers = [...document.querySelectorAll("button[aria-controls]")];

/** Close the open drawer; return whether there was one. `giveBack`: focus the button that opened
 * it. */
export function closeDrawer(giveBack = false) {
  const opener = openers.find((button) => button.getAttribute("aria-expanded") === "true");
  if (!opener) return false;
  delete body.dataset.drawer;
  opener.setAttribute("aria-expanded", "false");
  if (giveBack) opener.focus();
  return true;
}

export function followDrawers() {
  for (const opener of openers) {
    opener.addEventListener("click", () => {
      const name = opener.getAttribute("aria-controls");
      const opens = body.dataset.drawer !== name;
      closeDrawer();
      if (!opens) return;
      body.dataset.drawer = name;
      opener.setAttribute("aria-expanded", "true");
      document.getElementById(name).focus();
    });
  }
  document.querySelector("main").addEventListener("click", () => closeDrawer());
}
