// What a curve has at the nearest place, for mouse, finger and arrow keys; and a page that is watched loads itself again where it was.
const SVG = "http://www.w3.org/2000/svg";
const made = (parent, name, attributes, text) => {
  const element = parent.namespaceURI === SVG ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
};
for (const chart of document.querySelectorAll(".chart")) {
  const points = JSON.parse(chart.dataset.points);
  const svg = chart.querySelector("svg"), at = chart.querySelector(".at"), tip = chart.querySelector(".tip");
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  let shown = -1;
  const hide = () => { shown = -1; at.replaceChildren(); tip.hidden = true; };
  const show = (index) => {
    shown = index;
    const [x, name, rows] = points[index];
    at.replaceChildren();
    tip.replaceChildren();
    made(at, "line", { x1: x, x2: x, y1: 0, y2: height - 24 });
    made(tip, "b", {}, name);
    for (const [label, value, y, colour] of rows) {
      made(at, "circle", { class: "c" + colour, cx: x, cy: y, r: 3.5 });
      const line = made(tip, "div", {});
      made(line, "i", { class: "c" + colour });
      line.append(label + " " + value);
    }
    tip.hidden = false;
    const right = x > width / 2;
    tip.style.left = right ? "auto" : (100 * (x + 8)) / width + "%";
    tip.style.right = right ? (100 * (width - x + 8)) / width + "%" : "auto";
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    let best = 0;
    points.forEach((p, i) => { if (Math.abs(p[0] - x) < Math.abs(points[best][0] - x)) best = i; });
    show(best);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    show(shown < 0 ? points.length - 1 : Math.min(points.length - 1, Math.max(0, shown + by)));
  });
}
const seconds = Number(document.body.dataset.refresh);
if (seconds) {
  const key = "report " + location.pathname;
  const kept = () => { try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; } };
  const folds = () => [...document.querySelectorAll("details")];
  const before = kept();
  if (before) {
    if (before.open.length === folds().length) folds().forEach((fold, i) => { fold.open = before.open[i]; });
    scrollTo(0, before.y);
  }
  setInterval(() => {
    if (document.hidden || document.querySelector(".tip:not([hidden])") || String(getSelection())) return;
    try { sessionStorage.setItem(key, JSON.stringify({ y: scrollY, open: folds().map((fold) => fold.open) })); } catch { /* it goes to the top */ }
    location.reload();
  }, 1000 * seconds);
}
