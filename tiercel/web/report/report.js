"use strict";
// Niceties only; the page is complete without them.

function nearest(points, step) {
  return points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
}

function number(value) {
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function enliven(root) {
  for (const svg of root.querySelectorAll("svg[data-hover]")) {
    const series = JSON.parse(svg.dataset.hover);
    const [low, high, left, right] = JSON.parse(svg.dataset.steps);
    const cursor = svg.querySelector(".cursor");
    const readout = svg.parentElement.querySelector(".readout");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const wanted = low + ((x - left) / (right - left)) * (high - low);
      const step = nearest(series[0].p, wanted)[0];
      const place = left + ((step - low) / (high - low)) * (right - left);
      cursor.setAttribute("x1", place);
      cursor.setAttribute("x2", place);
      cursor.setAttribute("visibility", "visible");
      const said = series.map((each) => {
        const [at, value] = nearest(each.p, step);
        const where = at === step ? "" : ` (step ${at})`;
        return series.length > 1 ? `${each.l} ${number(value)}${where}` : number(value);
      });
      readout.textContent = `step ${step}: ${said.join(", ")}`;
    });
    svg.addEventListener("pointerleave", () => {
      cursor.setAttribute("visibility", "hidden");
      readout.textContent = "";
    });
  }

  for (const row of root.querySelectorAll("tr[data-box]")) {
    const boxes = row.closest(".card").querySelectorAll("g[data-box]");
    const light = (on) => {
      row.classList.toggle("lit", on);
      for (const box of boxes) box.classList.toggle("dimmed", on && box.dataset.box !== row.dataset.box);
    };
    row.addEventListener("pointerenter", () => light(true));
    row.addEventListener("pointerleave", () => light(false));
  }
}

enliven(document);

window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details.step")) details.open = true;
});
