// @ts-check
/** Colours, and what is drawn on canvases. */

const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7a00", "#6a51a3"];

/** A request's colour; -1 is nobody. @param {number} request */
export function hue(request) {
  return request < 0 ? "#777" : HUES[request % HUES.length];
}

/** Black or white, whichever is read better on a colour (WCAG's relative luminance).
 * @param {string} colour #rrggbb or #rgb */
export function inkOn(colour) {
  const digits = colour.length === 4 ? [...colour.slice(1)].map((d) => d + d) : colour.match(/[0-9a-f]{2}/g) ?? [];
  const [r, g, b] = digits.map((d) => (parseInt(d, 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

/** Diagonal lines, so that a state is told apart without colour.
 * @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} w @param {number} h @param {string} colour */
export function hatch(context, x, y, w, h, colour) {
  if (w < 2 || h < 2) return;
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour;
  context.globalAlpha = 0.55;
  context.lineWidth = 1;
  context.beginPath();
  for (let d = -h; d < w; d += 5) { context.moveTo(x + d, y + h); context.lineTo(x + d + h, y); }
  context.stroke();
  context.restore();
}

/** Light or dark: the style sheet holds the colours of both. */
export class Theme {
  /** @param {HTMLElement} main whose style has the colours */
  constructor(main) {
    this.main = main;
    this.darkQuery = matchMedia("(prefers-color-scheme: dark)");
    /** @type {"light" | "dark" | null} */ this.chosen = null; // null: as the system has it
    /** @type {Map<string, string>} */ this.colours = new Map();
    this.unit = 1; // how much larger than usual letters are
  }

  /** Letters are larger on a projector; what is drawn grows with them. */
  measure() {
    this.unit = parseFloat(getComputedStyle(this.main).fontSize) / 14;
  }

  /** @param {number} pixels of an ordinary page @param {number} [weight] */
  font(pixels, weight = 400) {
    return `${weight} ${pixels * this.unit}px system-ui, sans-serif`;
  }

  get name() {
    return this.chosen ?? (this.darkQuery.matches ? "dark" : "light");
  }

  /** Have the style sheet follow. */
  apply() {
    this.main.dataset.theme = this.name;
  }

  /** A colour by the name of its CSS variable, looked up once. @param {string} name @returns {string} */
  colour(name) {
    let value = this.colours.get(name);
    if (value === undefined) {
      value = getComputedStyle(this.main).getPropertyValue(`--${name}`).trim();
      this.colours.set(name, value);
    }
    return value;
  }

  /** Ready a canvas, at the screen's resolution and as wide as its parent. `isFresh`: it is empty, else what was
   * drawn still stands. @param {HTMLCanvasElement} canvas @param {number} height */
  ready(canvas, height) {
    const width = canvas.parentElement?.clientWidth || 600;
    const scale = devicePixelRatio || 1;
    const key = `${width} ${height} ${scale} ${this.name}`;
    const isFresh = canvas.dataset.drawn !== key;
    if (isFresh) {
      canvas.dataset.drawn = key;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
      this.colours.clear();
    }
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(scale, 0, 0, scale, 0, 0);
    return { context, width, isFresh };
  }
}
