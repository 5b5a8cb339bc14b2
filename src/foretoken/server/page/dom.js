// Elements in a line. Text is always set as text, so that nothing that a model writes is markup.

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

/** `draw`, some seconds after the first of any number of calls: for what comes faster than one
 * reads. */
export function paced(draw, seconds) {
  let timer = null;
  return () => {
    timer ??= setTimeout(() => {
      timer = null;
      draw();
    }, seconds * 1000);
  };
}
