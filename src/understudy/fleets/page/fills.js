// The fills of a pool's cells, on one canvas behind them: KV in use, host KV at the right edge, a bar on top if requests wait.

import {colour, resize} from "./canvas.js";
import {el} from "./format.js";

const PALE = new Set(["paused", "draining", "stopped"]), EDGE = 3;

export class Fills {
  constructor(isTiny) {
    this.isTiny = isTiny;
    this.node = el("canvas");
    this.node.ariaHidden = true;
  }

  /** Read the boxes inside the cells' borders; the fills are drawn anew after it. */
  place(cells, first) {
    const grid = this.node.parentNode.getBoundingClientRect();
    this.first = first;
    this.boxes = cells.map(cell => {
      const box = cell.node.getBoundingClientRect(), left = Math.round(box.left - grid.left) + 1, top = Math.round(box.top - grid.top) + 1;
      return {left, top, width: Math.round(box.right - grid.left) - 1 - left, height: Math.round(box.height) - 2, shown: ""};
    });
    this.context = resize(this.node, Math.ceil(grid.width), Math.ceil(grid.height));
  }

  /** Draw the fill of a worker if a pixel of it changes. */
  draw(worker, w) {
    const box = this.boxes[worker - this.first], state = w.state[worker], waits = w.waiting[worker] > 0;
    const fill = Math.ceil(w.usage[worker] * box.height), host = Math.ceil(w.host[worker] * box.height);
    const shown = `${state} ${waits} ${fill} ${host}`;
    if (box.shown === shown) return;
    box.shown = shown;
    const {left, top, width, height} = box, bottom = top + height, {context} = this;
    context.clearRect(left, top, width, height);
    if (state !== "dead") {
      context.fillStyle = colour(state);
      context.globalAlpha = this.isTiny ? 0.12 : 0.08;
      context.fillRect(left, top, width, height - fill);
      context.globalAlpha = (this.isTiny ? 0.7 : 0.44) - (PALE.has(state) ? 0.12 : 0);
      context.fillRect(left, bottom - fill, width, fill);
      context.globalAlpha = 1;
      if (host) {
        context.fillStyle = colour("starting");
        context.fillRect(left + width - EDGE, bottom - host, EDGE, host);
      }
    }
    if (waits) {
      context.fillStyle = colour("wait");
      context.fillRect(left, top, width, EDGE);
    }
  }
}
