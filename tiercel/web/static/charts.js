"use strict";
// Charts: each <figure data-chart="JSON"> gets its picture, and says the values under the pointer.

const [WIDTH, HEIGHT] = [380, 200];
const [LEFT, RIGHT, TOP, BOTTOM] = [46, 10, 8, 24];

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Round numbers, 1, 2 or 5 times a power of ten apart, that reach from `low` to `high`.
function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const spacing = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const first = Math.floor(low / spacing + 1e-9);
  const last = Math.ceil(high / spacing - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, at) => (first + at) * spacing);
}

// Labels with the smallest number of decimals that tells neighbours apart.
function tickLabels(ticks) {
  const largest = Math.max(...ticks.map(Math.abs));
  const [, size, unit] = [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]].find(([from]) => largest >= from) || [0, 1, ""];
  const spacing = (ticks[1] - ticks[0]) / size;
  const decimals = Math.max(0, Math.ceil(-Math.log10(spacing) - 1e-9));
  return ticks.map((tick) => {
    if (Math.abs(tick) < spacing / 2) return "0";
    const text = largest < 1e-3 ? Number(tick.toPrecision(2)).toExponential() : (tick / size).toFixed(decimals) + unit;
    return text.replaceAll("-", "\u2212");
  });
}

function shown(value) {
  const isTiny = value !== 0 && Math.abs(value) < 0.001;
  return (isTiny ? value.toExponential(2) : String(Number(value.toPrecision(4)))).replaceAll("-", "\u2212");
}

// The mapping from steps and values to places in the picture.
function frameOf(chart) {
  const ticks = niceTicks(...chart.values, 4);
  const [first, last] = chart.steps;
  const [bottom, top] = [ticks[0], ticks.at(-1)];
  return {
    ticks,
    x: (step) => LEFT + ((step - first) / (last - first)) * (WIDTH - LEFT - RIGHT),
    y: (value) => TOP + ((top - Math.min(Math.max(value, bottom), top)) / (top - bottom)) * (HEIGHT - TOP - BOTTOM),
    stepAt: (x) => first + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first),
    path: (points, { x, y }) => "M" + points.map(([step, value]) => `${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("L"),
  };
}

function axes(chart, frame) {
  const floor = HEIGHT - BOTTOM;
  const lines = tickLabels(frame.ticks).flatMap((label, at) => {
    const y = frame.y(frame.ticks[at]);
    const line = svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: label === "0" ? "zero" : "grid" });
    return [line, svg("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, label)];
  });
  const [first, last] = chart.steps;
  const steps = niceTicks(first, last, 5).filter((step) => Number.isInteger(step) && step >= first && step <= last);
  const marks = steps.flatMap((step) => {
    const x = frame.x(step);
    const anchor = x > WIDTH - RIGHT - 12 ? "end" : "middle";
    const text = svg("text", { x: Math.min(x, WIDTH - 2), y: HEIGHT - 7, "text-anchor": anchor }, step.toLocaleString("en"));
    return [svg("line", { x1: x, x2: x, y1: floor, y2: floor + 4, class: "tick" }), text];
  });
  return [...lines, ...marks, svg("text", { x: 2, y: HEIGHT - 7 }, "step")];
}

function dot([step, value], frame, colour, ...title) {
  return svg("circle", { cx: frame.x(step), cy: frame.y(value), r: 3, class: `dot ${colour}` }, ...title);
}

// A line under its mean, or points with whiskers.
function drawnSeries(series, frame) {
  const colour = `c${series.colour}`;
  const line = (points, style) => svg("path", { d: frame.path(points, frame), class: `${style} ${colour}` });
  if (series.style === "points") {
    const whiskers = series.whiskers.map(([step, low, high]) => {
      const [x, bottom, top] = [frame.x(step), frame.y(low), frame.y(high)];
      return svg("path", { d: `M${x} ${bottom}V${top}M${x - 3} ${bottom}h6M${x - 3} ${top}h6`, class: `whisker ${colour}` });
    });
    const said = ([step, value]) => svg("title", {}, `step ${step.toLocaleString("en")}: ${shown(value)}`);
    return [line(series.points, "thin"), ...whiskers, ...series.points.map((point) => dot(point, frame, colour, said(point)))];
  }
  if (series.points.length === 1) return [dot(series.points[0], frame, colour)];
  return series.mean ? [line(series.points, "raw"), line(series.mean, "thick")] : [line(series.points, "thick")];
}

// Layers on top of one another, the first at the bottom; all have the same steps.
function drawnLayers(layers, frame) {
  const below = layers[0].points.map(() => 0);
  const areas = layers.map(({ points, colour }) => {
    const top = points.map(([step, value], at) => [step, (below[at] += value)]);
    const [from, to, floor] = [frame.x(top[0][0]), frame.x(top.at(-1)[0]), frame.y(0)];
    return svg("path", { d: `${frame.path(top, frame)}L${to} ${floor}L${from} ${floor}Z`, class: `area c${colour}` });
  });
  return areas.reverse();
}

function nearest(points, step) {
  return points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
}

// Say the values of the step under the pointer.
function follow(picture, cursor, readout, chart, frame) {
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = nearest(chart.series[0].points, frame.stepAt(((event.clientX - box.left) / box.width) * WIDTH))[0];
    cursor.setAttribute("x1", frame.x(step));
    cursor.setAttribute("x2", frame.x(step));
    cursor.setAttribute("visibility", "visible");
    const said = chart.series.map(({ label, points }) => {
      const [at, value] = nearest(points, step);
      const where = at === step ? "" : ` (step ${at})`;
      return chart.series.length > 1 ? `${label} ${shown(value)}${where}` : shown(value);
    });
    readout.textContent = `step ${step}: ${said.join(", ")}`;
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
}

function drawChart(figure) {
  const chart = JSON.parse(figure.dataset.chart);
  if (!Number.isFinite(chart.values[1] - chart.values[0])) return;
  const frame = frameOf(chart);
  const drawn = chart.layered ? drawnLayers(chart.series, frame) : chart.series.flatMap((each) => drawnSeries(each, frame));
  const cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const title = svg("title", {}, figure.querySelector(".title").textContent);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }, title, ...axes(chart, frame), ...drawn, cursor);
  figure.querySelector("figcaption").after(picture);
  follow(picture, cursor, figure.querySelector(".readout"), chart, frame);
}
