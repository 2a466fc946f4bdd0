"use strict";
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart), axis = chart.x;
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const raw = v => axis.log ? Math.log10(v) : v;
  const place = v => axis.start + (raw(v) - raw(axis.low)) / (raw(axis.high) - raw(axis.low)) * (axis.end - axis.start);
  const form = v => Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(3) : String(+v.toPrecision(5));
  const nearest = (points, at) => points.reduce((best, p) => Math.abs(place(p[0]) - at) < Math.abs(place(best[0]) - at) ? p : best);
  const line = (name, value) => {
    const row = document.createElement("div");
    for (const word of [name, value]) { const part = document.createElement("span"); part.textContent = word; row.append(part); }
    return row;
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * chart.width;
    const found = chart.series.map(s => ({ label: s.label, point: nearest(s.points, at) }));
    const x = found.map(f => f.point).reduce((best, p) => Math.abs(place(p[0]) - at) < Math.abs(place(best[0]) - at) ? p : best)[0];
    cursor.setAttribute("x1", place(x)); cursor.setAttribute("x2", place(x)); cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(line(chart.label, form(x)), ...found.filter(f => Math.abs(place(f.point[0]) - place(x)) < 12).map(f => line(f.label, form(f.point[1]))));
    tip.hidden = false;
    const right = at > chart.width / 2;
    tip.style.left = right ? "auto" : (at + 14) / chart.width * 100 + "%";
    tip.style.right = right ? (chart.width - at + 14) / chart.width * 100 + "%" : "auto";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
}
