// Canvases for what changes each second: drawing on them costs the browser no style and no layout.

const styles = getComputedStyle(document.documentElement), colours = new Map(), changed = [];

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours.clear();
  changed.forEach(draw => draw());
});

/** The value of a colour of page.css in the scheme that is shown. */
export function colour(name) {
  if (!colours.has(name)) colours.set(name, styles.getPropertyValue("--" + name).trim());
  return colours.get(name);
}

/** Call `draw` after a change between light and dark. */
export function onScheme(draw) { changed.push(draw); }

/** Size a canvas in CSS px, which empties it; return its context with that unit. */
export function resize(canvas, width, height) {
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  return context;
}
