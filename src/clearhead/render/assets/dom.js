// Builds DOM elements. Strings become text nodes, so that no token is ever parsed as HTML.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

// Attributes: `style` is an object set through the CSSOM, functions are event listeners, null and false are omitted.
const buildElement = (element, attributes, children) => {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else if (key === "style") for (const [name, propertyValue] of Object.entries(value)) element.style.setProperty(name, propertyValue);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};

export const h = (tag, attributes, ...children) => buildElement(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) => buildElement(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);

// Buttons of which one is selected; `onSelect` is called with the index of the selected one.
export const segmentedControl = (label, names, selectedIndex, onSelect) => {
  const buttons = names.map((name, index) =>
    h("button", { type: "button", class: "ch-segment", "aria-pressed": String(index === selectedIndex), click: () => {
      buttons.forEach((button, otherIndex) => button.setAttribute("aria-pressed", String(otherIndex === index)));
      onSelect(index);
    } }, name));
  return h("div", { class: "ch-segmented-control", role: "group", "aria-label": label }, buttons);
};

// A collapsed section whose content is made when it is first opened.
export const collapsible = (summary, makeContent, isLong = false) => {
  const details = h("details", { class: isLong && "ch-long-list", toggle: () => { if (details.open) details.fill(); } }, h("summary", null, summary));
  details.fill = () => {
    if (details.childElementCount === 1) details.append(...[makeContent()].flat().filter(Boolean));
  };
  return details;
};

// A box that scrolls if its content is wide; it can be scrolled with the keyboard.
export const scrollable = (label, ...children) =>
  h("div", { class: "ch-scroll", tabindex: 0, role: "region", "aria-label": label }, children);

// Decodes an array of array_codec.py to numbers.
export const decodeArray = (encoded) => {
  const text = atob(encoded.data), bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
  if (encoded.dtype === "u1") return bytes;
  if (encoded.dtype === "u2") return new Uint16Array(bytes.buffer);
  if (encoded.dtype === "f4") return new Float32Array(bytes.buffer);
  return Float32Array.from(new Int8Array(bytes.buffer), (level) => (level === -128 ? NaN : level * encoded.quantisation_step));
};
