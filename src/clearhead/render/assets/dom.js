// Elements by construction: whatever is a string becomes a text node, so that no token is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Attributes: `style` is an object set through the CSSOM, functions are listeners, null and false are left out.
const dressed = (element, attributes, children) => {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else if (key === "style") for (const [name, given] of Object.entries(value)) element.style.setProperty(name, given);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};

export const h = (tag, attributes, ...children) => dressed(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) => dressed(document.createElementNS(SVG, tag), attributes, children);

// A choice of one of several, as buttons; `choose` is called with the place of what was chosen.
export const choice = (label, names, chosen, choose) => {
  const buttons = names.map((name, place) =>
    h("button", { type: "button", class: "ch-choice", "aria-pressed": String(place === chosen), click: () => {
      buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === place)));
      choose(place);
    } }, name));
  return h("div", { class: "ch-choices", role: "group", "aria-label": label }, buttons);
};

// Something folded away, made when it is first opened.
export const folded = (summary, make, long = false) => {
  const details = h("details", { class: long && "ch-long", toggle: () => { if (details.open) details.fill(); } }, h("summary", null, summary));
  details.fill = () => {
    if (details.childElementCount === 1) details.append(...[make()].flat().filter(Boolean));
  };
  return details;
};

// Wide things scroll by themselves, with the keyboard, too.
export const scrolled = (label, ...children) =>
  h("div", { class: "ch-scroll", tabindex: 0, role: "region", "aria-label": label }, children);

// Bytes of a packed array as numbers; see packing.py.
export const unpacked = (packed) => {
  const text = atob(packed.data), bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  if (packed.type === "u1") return bytes;
  if (packed.type === "u2") return new Uint16Array(bytes.buffer);
  if (packed.type === "f4") return new Float32Array(bytes.buffer);
  return Float32Array.from(new Int8Array(bytes.buffer), (step) => (step === -128 ? NaN : step * packed.step));
};
