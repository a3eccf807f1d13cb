// @ts-check
/** Elements and words. A stranger's text reaches the page only as text, made visible by show(). */

/** Control, direction and format characters as visible symbols. @param {unknown} value */
export function show(value) {
  return String(value ?? "").replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g, (c) => {
    const code = c.charCodeAt(0);
    if (code === 0x0a) return "⏎";
    if (code === 0x09) return "⇥";
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟨${code.toString(16)}⟩`;
  });
}

/** An id where there is little room: of a long one its ends, by which ids differ. @param {string} id */
export function brief(id) {
  const letters = [...show(id)];
  return letters.length > 20 ? `${letters.slice(0, 9).join("")}…${letters.slice(-9).join("")}` : letters.join("");
}

/** "1 block", "5 blocks".
 * @param {number} count @param {string} noun */
export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** @param {string} tag @param {Record<string, any>} [attributes] @param {(Node | string)[]} children @returns {any} */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}

/** Before a place is filled anew: what puts the focus back afterwards, on what has the same `data-key`, else on the
 * viewer, so that keys go on working. @param {HTMLElement} place */
export function keepFocus(place) {
  const focused = /** @type {HTMLElement | null} */ (/** @type {ShadowRoot} */ (place.getRootNode()).activeElement);
  if (!focused || focused === place || !place.contains(focused)) return () => {};
  return () => {
    const again = focused.isConnected ? focused : place.querySelector(`[data-key="${focused.dataset.key}"]`) ?? place.closest(".viewer");
    /** @type {HTMLElement} */ (again).focus({ preventScroll: true });
  };
}

/** Put new content into a place. @param {HTMLElement} place @param {(Node | string)[]} children */
export function refill(place, ...children) {
  const refocus = keepFocus(place);
  place.replaceChildren(...children);
  refocus();
}

/** @param {string} text */
export function note(text) {
  return el("p", { class: "note" }, text);
}

/** A line that explains colours; a name stands for its own colour.
 * @param {(string | Node | [name: string, label: string])[]} keys */
export function legend(...keys) {
  const key = (/** @type {any} */ k) => {
    if (k instanceof Node) return k;
    if (typeof k === "string") return el("span", { class: "key" }, k);
    return el("span", { class: "key" }, el("span", { class: `swatch ${k[0].replace(" ", "-")}` }), k[1]);
  };
  return el("p", { class: "legend" }, ...keys.map(key));
}
