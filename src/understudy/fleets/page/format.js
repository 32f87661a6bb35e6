// Text and small DOM helpers. All text enters the page as text nodes, never as HTML.

export const $ = id => document.getElementById(id);

export function el(name, cls, ...content) {
  const node = document.createElement(name);
  if (cls) node.className = cls;
  node.append(...content.map(String));
  return node;
}

export function add(node, ...children) { node.append(...children); return node; }

/** Set text only where it differs, so that an unchanged cell costs no layout. */
export function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0}), tenths = new Intl.NumberFormat("en", {maximumFractionDigits: 1});

/** 12345.67 → "12,346"; with a decimal: "12,345.7". */
export const grouped = n => whole.format(n);
export const decimal = n => tenths.format(n);

export function short(n) {
  if (n >= 1e7) return (n / 1e6).toFixed(0) + "M";
  if (n >= 1e6) return (n / 1e6).toFixed(1) + "M";
  if (n >= 1e5) return (n / 1e3).toFixed(0) + "k";
  if (n >= 1e4) return (n / 1e3).toFixed(1) + "k";
  return grouped(n);
}

export const percent = share => (100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0) + " %";

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e4) return (value / 1e3).toFixed(0) + " s";
  if (value >= 1e3) return (value / 1e3).toFixed(1) + " s";
  return value.toFixed(value < 10 ? 1 : 0) + " ms";
}

export function seconds(value) {
  if (value < 10) return value.toFixed(1) + " s";
  return value < 120 ? Math.round(value) + " s" : Math.round(value / 60) + " min";
}

export const count = (n, one) => grouped(n) + " " + one + (n === 1 ? "" : "s");

/** 3, 17, 18, 19 → "3, 17–19"; after `most` parts, the number of the others. */
export function ranges(numbers, most = 6) {
  const parts = [];
  let shown = 0;
  for (let i = 0; i < numbers.length && parts.length < most;) {
    let last = i;
    while (last + 1 < numbers.length && numbers[last + 1] === numbers[last] + 1) last++;
    parts.push(last === i ? numbers[i] : last === i + 1 ? numbers[i] + ", " + numbers[last] : numbers[i] + "–" + numbers[last]);
    shown += last - i + 1;
    i = last + 1;
  }
  if (shown < numbers.length) parts.push("and " + (numbers.length - shown) + " more");
  return parts.join(", ");
}

/** "3, 17-19" → [3, 17, 18, 19]; "" or "all" → null. An Error names a part that is no number or range. */
export function readWorkers(text) {
  if (/^\s*(all)?\s*$/i.test(text)) return null;
  const numbers = new Set();
  for (const part of text.split(",")) {
    const found = /^\s*(\d{1,6})(?:\s*[-–]\s*(\d{1,6}))?\s*$/.exec(part);
    if (!found) throw new Error(`workers: "${part.trim()}" is no number or range; write 3, 17-20`);
    const first = +found[1], last = +(found[2] ?? found[1]);
    if (last < first || last - first > 100000) throw new Error(`workers: ${part.trim()} is no range; write the smaller number first`);
    for (let i = first; i <= last; i++) numbers.add(i);
  }
  return [...numbers].sort((a, b) => a - b);
}
