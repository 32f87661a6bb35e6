// Four charts over one time axis: latencies with percentiles, throughput, and the queue; faults are marks.

import {colour, onScheme, resize} from "./canvas.js";
import {add, el, ms, ranges, setText, short} from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const SPAN_S = 300, HEIGHT = 124, LEFT = 47, RIGHT = 8, TOP = 15, BOTTOM = 17, NEAR_S = 4, TAIL = 4;
const WIDTHS = {p50: 2, p90: 1.3, p99: 1.3, run: 1.8, wait: 1.8};
const axis = unit => value => value === 0 ? "0" : unit(value).replace(".0 ", " ");
const percentiles = prefix => [["p50", prefix + "_p50"], ["p90", prefix + "_p90"], ["p99", prefix + "_p99"]];
const CHARTS = [
  {title: "Time to first token", unit: ms, lines: percentiles("ttft"), band: true},
  {title: "Inter-token latency", unit: ms, lines: percentiles("itl"), band: true},
  {title: "Output tokens per second", unit: short, least: 2, lines: [["run", "output_rate"]], area: true,
    more: at => [["prompt", short(at("prompt_rate")) + "/s"], ["requests", at("request_rate").toFixed(1) + "/s"]]},
  {title: "Requests", unit: short, least: 2, lines: [["run", "running"], ["wait", "waiting"]], names: ["running", "waiting"], area: true},
];

function svg(name, attributes, cls) {
  const node = document.createElementNS(SVG, name);
  if (cls) node.setAttribute("class", cls);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** The next number of 1, 2, 2.5, 5 times a power of ten, so that half of it is a round number too. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 6, 8, 10].find(step => step * power >= value) * power;
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.node = el("div", "card chart");
    this.head = el("div", "now");
    this.picture = svg("svg", {role: "img", "aria-label": spec.title});
    this.grid = [0, 1, 2].map(() => svg("line", {}, "grid"));
    this.scale = [0, 1, 2].map(() => svg("text", {"text-anchor": "end"}));
    this.times = [0, 1, 2].map(i => svg("text", {"text-anchor": ["start", "middle", "end"][i]}));
    this.marks = svg("g", {});
    this.canvas = el("canvas");
    this.cursor = svg("line", {y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"}, "cursor");
    add(this.picture, ...this.grid, ...this.scale, ...this.times, this.marks, this.cursor);
    add(this.node, el("h2", "", spec.title), this.head, add(el("div", "plot"), this.canvas, this.picture));
    this.buildHead();
  }

  buildHead() {
    const {lines, names} = this.spec;
    this.values = lines.map(([name], i) => {
      const box = i === 0 ? el("b") : el("span"), value = el("span");
      if (i === 0 && lines.length > 1) add(this.head, box, this.label("k-" + name, names?.[i] ?? name));
      else if (i > 0) add(this.head, add(box, el("i", "key k-" + name), value, " " + (names?.[i] ?? name)));
      else add(this.head, box);
      return i === 0 ? box : value;
    });
    this.more = this.spec.more ? add(this.head, el("span")).lastChild : null;
  }

  label(key, text) { return add(el("span"), el("i", "key " + key), text); }

  draw(fleet, width, hover) {
    const at = Object.fromEntries(fleet.columns.map((name, i) => [name, i]));
    const right = width - RIGHT, perSecond = (right - LEFT) / SPAN_S * devicePixelRatio;
    const rows = fleet.rows, end = Math.ceil(fleet.time * perSecond) / perSecond;  // whole px, so that lines can be moved
    const x = t => right - (end - t) / SPAN_S * (right - LEFT);
    const keys = this.spec.lines.map(([, key]) => at[key]);
    const visible = rows.filter(row => row[0] >= end - SPAN_S);
    let most = 0;
    for (const row of visible) for (const key of keys) if (row[key] > most) most = row[key];
    const top = ceiling(Math.max(most * 1.04, this.spec.least ?? 0)), bottom = HEIGHT - BOTTOM;
    const y = value => bottom - value / top * (bottom - TOP);
    if (this.width !== width) this.layout(width);
    const moved = this.fleet === fleet && this.top === top ? Math.round((end - this.end) * perSecond) : Infinity;
    Object.assign(this, {fleet, end});
    if (this.top !== top) {
      this.top = top;
      this.scale.forEach((text, i) => setText(text, axis(this.spec.unit)(top * i / 2)));
    }
    this.drawLines(this.moveLines(moved, visible, x, width), keys, x, y);
    this.drawMarks(fleet, x, width);
    const row = hover === null ? visible.at(-1) : nearest(visible, end - (right - hover) / (right - LEFT) * SPAN_S);
    this.cursor.setAttribute("visibility", hover !== null && row ? "visible" : "hidden");
    if (row) {
      const place = x(row[0]).toFixed(1);
      this.cursor.setAttribute("x1", place);
      this.cursor.setAttribute("x2", place);
      const texts = keys.map(key => row[key] === null ? "–" : this.spec.unit(row[key])), unit = / .+$/.exec(texts[0])?.[0];
      this.values.forEach((value, i) => setText(value, i && unit ? texts[i].replace(unit, "") : texts[i]));
      if (this.more) setText(this.more, this.spec.more(name => row[at[name]]).map(([name, value]) => name + " " + value).join(" · "));
    }
  }

  /** Move the lines to the left by device px, and empty the rest of the chart; return the rows to draw there. */
  moveLines(moved, rows, x, width) {
    const {pen} = this, from = Math.floor((width - RIGHT - TAIL) * devicePixelRatio - moved) / devicePixelRatio;
    pen.restore();
    pen.save();
    if (from < LEFT) {
      pen.clearRect(0, 0, width, HEIGHT);
      return rows;
    }
    pen.resetTransform();
    pen.globalCompositeOperation = "copy";
    pen.drawImage(this.canvas, -moved, 0);
    pen.restore();
    pen.save();
    pen.clearRect(0, 0, LEFT, HEIGHT);
    pen.clearRect(from, 0, width, HEIGHT);
    pen.beginPath();
    pen.rect(from, 0, width, HEIGHT);
    pen.clip();
    const first = rows.findIndex(row => x(row[0]) >= from);
    return first < 0 ? [] : rows.slice(Math.max(0, first - 2));
  }

  drawLines(rows, keys, x, y) {
    const {pen, spec} = this;
    pen.fillStyle = colour("band");
    for (const piece of pieces(rows, keys[0])) {
      pen.beginPath();
      trace(pen, piece, x, row => y(row[keys[0]]));
      trace(pen, piece.toReversed(), x, row => y(spec.band ? row[keys.at(-1)] : 0), "lineTo");
      pen.fill();
    }
    for (let i = keys.length - 1; i >= 0; i--) {
      const name = spec.lines[i][0];
      pen.strokeStyle = colour(name);
      pen.lineWidth = WIDTHS[name];
      pen.beginPath();
      for (const piece of pieces(rows, keys[i])) trace(pen, piece, x, row => y(row[keys[i]]));
      pen.stroke();
    }
  }

  layout(width) {
    this.width = width;
    this.pen = resize(this.canvas, width, HEIGHT);
    this.pen.lineJoin = "round";
    this.pen.save();
    this.fleet = null;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const bottom = HEIGHT - BOTTOM;
    this.grid.forEach((node, i) => {
      const y = Math.round(bottom - i / 2 * (bottom - TOP)) + 0.5;
      for (const [key, value] of [["x1", LEFT], ["x2", width - RIGHT], ["y1", y], ["y2", y]]) node.setAttribute(key, value);
      this.scale[i].setAttribute("x", LEFT - 5);
      this.scale[i].setAttribute("y", y + 3.5);
    });
    ["−5 min", "−2.5 min", "now"].forEach((text, i) => {
      this.times[i].setAttribute("x", LEFT + i / 2 * (width - RIGHT - LEFT));
      this.times[i].setAttribute("y", HEIGHT - 4);
      setText(this.times[i], text);
    });
  }

  /** Draw a line for each fault that began or ended; text where it overlaps none of a later one. */
  drawMarks(fleet, x, width) {
    const shown = fleet.marks.filter(mark => mark.t >= fleet.time - SPAN_S);
    if (!shown.length && !this.marks.firstChild) return;
    const nodes = shown.map(mark => {
      const place = x(mark.t).toFixed(1);
      return svg("line", {x1: place, x2: place, y1: TOP - 2, y2: HEIGHT - BOTTOM}, mark.ended ? "mark ended" : "mark");
    });
    let limit = width;
    for (let last = shown.length - 1; last >= 0;) {  // one text for marks side by side
      let first = last;
      while (first > 0 && shown[last].t - shown[first - 1].t < NEAR_S) first--;
      const near = shown.slice(first, last + 1), mark = near.find(one => one.kind === "kill" && !one.ended) ?? near[0];
      const words = markText(mark) + (near.length > 1 ? ` +${near.length - 1}` : ""), size = words.length * 5.8 + 6;
      const place = x(near[0].t), begin = place + 3 + size <= limit ? place + 3 : place - 3 - size;
      last = first - 1;
      if (begin < LEFT || begin + size > limit) continue;
      const text = svg("text", {x: begin.toFixed(1), y: 10}, mark.ended ? "mark-text ended" : "mark-text");
      text.textContent = words;
      nodes.push(text);
      limit = begin;
    }
    this.marks.replaceChildren(...nodes);
  }
}

function markText(mark) {
  const kind = mark.kind.replace("_", " ");
  if (mark.ended) return kind + " ended";
  return mark.workers.length > 4 ? `${kind} ×${mark.workers.length}` : `${kind} ${ranges(mark.workers, 3)}`;
}

function nearest(rows, t) {
  return rows.reduce((best, row) => best && Math.abs(best[0] - t) <= Math.abs(row[0] - t) ? best : row, null);
}

/** The stretches of rows that have a value. */
function pieces(rows, key) {
  const found = [];
  let piece = null;
  for (const row of rows) {
    if (row[key] === null) { piece = null; continue; }
    if (!piece) found.push(piece = []);
    piece.push(row);
  }
  return found;
}

function trace(pen, rows, x, y, first = "moveTo") {
  rows.forEach((row, i) => pen[i ? "lineTo" : first](x(row[0]), y(row)));
}

export class Charts {
  constructor(box) {
    this.charts = CHARTS.map(spec => new Chart(spec));
    this.hover = null;
    box.replaceChildren(...this.charts.map(chart => chart.node));
    for (const chart of this.charts) {
      chart.picture.onpointermove = event => {
        this.hover = Math.max(LEFT, event.clientX - chart.picture.getBoundingClientRect().left);
        this.draw(this.fleet);
      };
      chart.picture.onpointerleave = () => { this.hover = null; this.draw(this.fleet); };
    }
    onScheme(() => {
      for (const chart of this.charts) chart.fleet = null;
      this.draw(this.fleet);
    });
    new ResizeObserver(([entry]) => { this.width = Math.round(entry.contentRect.width); this.draw(this.fleet); })
      .observe(this.charts[0].picture);
  }

  draw(fleet) {
    this.fleet = fleet;
    if (fleet && this.width) for (const chart of this.charts) chart.draw(fleet, this.width, this.hover);
  }
}
