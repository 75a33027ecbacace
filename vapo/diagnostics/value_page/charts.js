"use strict";
// Charts of the whole iteration, as SVG that takes its colours from the page's style.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320, HEIGHT = 190, LEFT = 38, RIGHT = 8, TOP = 8, BOTTOM = 30;

// An element with text children only: nothing of the data is ever read as markup.
function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function shape(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function number(x, digits = 3) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "\u2013";
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5)) return x.toExponential(2).replace("-", "\u2212");
  return x.toFixed(digits).replace("-", "\u2212");
}

function signed(x, digits = 3) {
  return (x > 0 ? "+" : "") + number(x, digits);
}

function ticks(low, high, wanted = 4) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || rough;
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) found.push(x + 0);
  return found;
}

function tickLabel(x) {
  return Number(x.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 4 }).replace("-", "\u2212");
}

function extent(numbers) {
  const finite = numbers.filter(Number.isFinite);
  let low = Math.min(...finite), high = Math.max(...finite);
  if (!finite.length) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const margin = 0.05 * (high - low);
  return [low - margin, high + margin];
}

// Axes of a chart; `x` and `y` map data to the SVG's units.
function axes(xDomain, yDomain, xLabel) {
  const x = (v) => LEFT + ((v - xDomain[0]) / (xDomain[1] - xDomain[0])) * (WIDTH - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - ((v - yDomain[0]) / (yDomain[1] - yDomain[0])) * (HEIGHT - TOP - BOTTOM);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  for (const v of ticks(...yDomain)) {
    svg.append(shape("path", { class: "grid", d: `M${LEFT} ${y(v)}H${WIDTH - RIGHT}` }));
    svg.append(shape("text", { x: LEFT - 4, y: y(v) + 3, "text-anchor": "end" }, tickLabel(v)));
  }
  for (const v of ticks(...xDomain, 5)) {
    svg.append(shape("text", { x: x(v), y: HEIGHT - BOTTOM + 12, "text-anchor": "middle" }, tickLabel(v)));
  }
  if (yDomain[0] < 0 && yDomain[1] > 0) svg.append(shape("path", { class: "zero", d: `M${LEFT} ${y(0)}H${WIDTH - RIGHT}` }));
  svg.append(shape("path", { class: "axis", d: `M${LEFT} ${TOP}V${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }));
  svg.append(shape("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xLabel));
  return { svg, x, y };
}

function figure(title, svg, keys, remark) {
  const found = element("figure", "", element("figcaption", "", title), svg);
  const line = element("p", "", ...keys.map(([name, kind]) => element("span", `key ${kind}`, name)));
  if (remark) line.append(remark);
  found.append(line);
  svg.append(shape("title", {}, title));
  return found;
}

// series: {name, kind, x, y, band: [low, high] or undefined}
function lineChart(title, xLabel, series, remark) {
  const ys = series.flatMap((s) => [...s.y, ...(s.band ? s.band.flat() : [])]).filter((v) => v !== null);
  const { svg, x, y } = axes(extent(series.flatMap((s) => s.x)), extent(ys), xLabel);
  for (const s of series) {
    if (s.band) {
      const up = s.x.map((v, i) => `${x(v)} ${y(s.band[1][i])}`);
      const down = s.x.map((v, i) => `${x(v)} ${y(s.band[0][i])}`).reverse();
      svg.append(shape("path", { class: `band ${s.kind}`, d: `M${[...up, ...down].join("L")}Z` }));
    }
  }
  for (const s of series) {
    const points = s.x.map((v, i) => [v, s.y[i]]).filter(([, v]) => v !== null);
    if (!points.length) continue;
    const d = "M" + points.map(([a, b]) => `${x(a)} ${y(b)}`).join("L");
    svg.append(shape("path", { class: `line ${s.kind}${s.dashed ? " dashed" : ""}`, d }));
    for (const [a, b] of points) {
      const told = shape("title", {}, `${s.name} at ${tickLabel(a)}: ${number(b)}`);
      svg.append(shape("circle", { class: `dot ${s.kind}`, cx: x(a), cy: y(b), r: points.length > 40 ? 1.2 : 2.2 }, told));
    }
  }
  return figure(title, svg, series.map((s) => [s.name, s.kind]), remark);
}

function calibrationChart(rows) {
  const both = extent([...rows.value_mean, ...rows.return_mean, ...rows.return_ci_low, ...rows.return_ci_high]
    .filter((v) => v !== null));
  const { svg, x, y } = axes(both, both, "predicted value");
  svg.append(shape("path", { class: "line c dashed", d: `M${x(both[0])} ${y(both[0])}L${x(both[1])} ${y(both[1])}` }));
  const most = Math.max(...rows.num_tokens);
  rows.value_mean.forEach((v, i) => {
    const [low, high] = [rows.return_ci_low[i], rows.return_ci_high[i]];
    if (low !== null) svg.append(shape("path", { class: "line a", d: `M${x(v)} ${y(low)}V${y(high)}` }));
    const told = `value ${number(v)}, return ${number(rows.return_mean[i])} [${number(low)}, ${number(high)}]; ` +
      `${rows.num_tokens[i]} tokens, ${rows.num_prompts[i]} prompts`;
    const r = 2 + 4 * Math.sqrt(rows.num_tokens[i] / most);
    svg.append(shape("circle", { class: "dot a", cx: x(v), cy: y(rows.return_mean[i]), r }, shape("title", {}, told)));
  });
  const remark = "Area: number of tokens. Bars: 95 % intervals, with a prompt as one draw. Below the line: too optimistic.";
  return figure("Calibration of the value", svg, [["return achieved", "a"], ["perfect", "c"]], remark);
}

function histogram(rows) {
  const top = Math.max(...rows.num_tokens);
  const { svg, x, y } = axes(extent([...rows.low, ...rows.high]), [0, top * 1.05], "predicted value");
  rows.low.forEach((low, i) => {
    const right = rows.num_correct_tokens[i], all = rows.num_tokens[i];
    const width = Math.max(1, x(rows.high[i]) - x(low) - 1);
    const told = `${number(low)} to ${number(rows.high[i])}: ${right} tokens of right answers, ${all - right} of wrong`;
    for (const [from, to, kind] of [[0, right, "a"], [right, all, "b"]]) {
      const bar = { class: `bar ${kind}`, x: x(low), y: y(to), width, height: Math.max(0, y(from) - y(to)) };
      svg.append(shape("rect", bar, shape("title", {}, told)));
    }
  });
  return figure("Tokens by predicted value", svg, [["right answers", "a"], ["wrong answers", "b"]]);
}

function drawCharts(place, positions, calibration) {
  const at = positions.position, where = "token position in the response";
  const band = (name) => [-1, 1].map((sign) => positions[`${name}_mean`].map((m, i) => m + sign * positions[`${name}_std`][i]));
  const add = (node) => place.append(node);
  if (positions.value_mean) {
    add(lineChart("Mean value, and what was achieved", where, [
      { name: "value", kind: "a", x: at, y: positions.value_mean, band: band("value") },
      { name: "return", kind: "b", dashed: true, x: at, y: positions.return_mean },
    ], "Shading: one standard deviation of the value."));
    add(lineChart("Explained variance of the return", where,
      [{ name: "1 perfect, 0 a constant", kind: "a", x: at, y: positions.explained_variance }]));
  }
  if (positions.advantage_mean) {
    add(lineChart("Mean advantage, before whitening", where,
      [{ name: "advantage", kind: "a", x: at, y: positions.advantage_mean, band: band("advantage") }],
      "Shading: one standard deviation."));
  }
  if (calibration.value_mean) {
    add(calibrationChart(calibration));
    add(histogram(calibration));
  }
  if (at) {
    add(lineChart("Tokens at each position", where,
      [{ name: "tokens", kind: "a", x: at, y: positions.num_tokens }], "Few tokens: noisy means."));
  }
}
