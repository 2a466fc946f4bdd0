"use strict";
for (const figure of document.querySelectorAll("figure[data-timeline]")) {
  const data = JSON.parse(figure.dataset.timeline);
  const canvas = figure.querySelector("canvas"), tip = figure.querySelector(".tip"), pen = canvas.getContext("2d");
  const LEFT = 132, TOP = 6, BOTTOM = 26, ROW = 46, STRIPS = [[3, 18], [22, 8], [31, 5], [37, 5]];
  const height = TOP + data.rows.length * ROW + BOTTOM, least = data.end / 1e5;
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const rows = data.rows.map(() => data.lanes.map(() => []));
  for (const event of data.events) rows[event[0]][event[1]].push(event);
  let from = 0, to = data.end, width = 0;
  const x = t => LEFT + (t - from) / (to - from) * (width - LEFT - 8);
  const time = at => from + (at - LEFT) / (width - LEFT - 8) * (to - from);
  const text = us => us >= 1e6 ? (us / 1e6).toFixed(3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(3) + " ms" : us.toFixed(1) + " us";
  const draw = () => {
    const scale = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = height + "px";
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    const colours = data.colours.map(number => colour("--c" + number)), quiet = colour("--quiet"), line = colour("--line");
    const rough = (to - from) / 8, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
    pen.textBaseline = "alphabetic";
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      pen.fillStyle = line; pen.fillRect(x(tick), TOP, 1, height - TOP - BOTTOM + 4);
      pen.fillStyle = quiet; pen.textAlign = "center"; pen.fillText(+(tick / 1000).toPrecision(7) + " ms", x(tick), height - 8);
    }
    rows.forEach((lanes, row) => {
      const top = TOP + row * ROW;
      pen.fillStyle = line; pen.fillRect(0, top + ROW - 2, width, 1);
      pen.textAlign = "left"; pen.fillStyle = quiet;
      data.rows[row].split("\n").forEach((words, number) => pen.fillText(words, 0, top + 16 + 15 * number));
      lanes.forEach((events, lane) => {
        const [offset, size] = STRIPS[lane];
        for (const [, , name, start, end] of events) {
          if (end < from || start > to) continue;
          const left = Math.max(LEFT, x(start)), right = Math.min(width - 8, x(end));
          pen.fillStyle = colours[name];
          pen.fillRect(left, top + offset, Math.max(0.4, right - left - (right - left > 3 ? 0.6 : 0)), size);
        }
      });
    });
  };
  const view = (start, span) => {
    span = Math.min(Math.max(span, least), data.end);
    from = Math.min(Math.max(0, start), data.end - span); to = from + span;
    draw();
  };
  const zoom = (factor, centre = (from + to) / 2) => view(centre - (centre - from) * factor, (to - from) * factor);
  const find = (px, py) => {
    const row = Math.floor((py - TOP) / ROW), inside = py - TOP - row * ROW, at = time(px);
    if (px < LEFT || !rows[row]) return null;
    const lane = STRIPS.findIndex(([offset, size]) => inside >= offset && inside <= offset + size + 1);
    const slack = (to - from) / width;
    return lane < 0 ? null : rows[row][lane].find(e => e[3] - slack <= at && at <= e[4] + slack);
  };
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, time(event.offsetX));
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    if (held !== null) { const moved = time(held) - time(event.offsetX); held = event.offsetX; view(from + moved, to - from); }
    const found = find(event.offsetX, event.offsetY);
    tip.hidden = !found;
    if (!found) return;
    const [row, lane, name, start, end] = found;
    tip.textContent = `${data.names[name]}\n${data.rows[row].split("\n")[0]}, ${data.lanes[lane]}\n${text(end - start)}, from ${text(start)} to ${text(end)}`;
    const right = event.offsetX > width / 2;
    tip.style.left = right ? "auto" : event.offsetX + 14 + "px"; tip.style.right = right ? width - event.offsetX + 14 + "px" : "auto";
    tip.style.top = event.offsetY + 14 + "px";
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", () => view(0, data.end));
  canvas.addEventListener("keydown", event => {
    const span = to - from, act = { "+": () => zoom(0.6), "-": () => zoom(1.7), ArrowLeft: () => view(from - span / 5, span), ArrowRight: () => view(from + span / 5, span) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  for (const button of figure.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => ({ in: () => zoom(0.5), out: () => zoom(2), all: () => view(0, data.end) })[button.dataset.zoom]());
  new ResizeObserver(draw).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
