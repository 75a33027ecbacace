"use strict";
// Charts of the whole iteration, as SVG that takes its colours from the page's style.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320, CHART_HEIGHT = 190, LEFT = 38, RIGHT = 8, TOP = 8, BOTTOM = 30;

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

// Names a drawing for a screen reader, and lets the keyboard reach it.
function described(svg, sentence) {
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", sentence);
  svg.setAttribute("tabindex", "0");
}

function mean(numbers) {
  let sum = 0;
  for (const x of numbers) sum += x;
  return sum / numbers.length;
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
function axes(xDomain, yDomain, xLabel, height = CHART_HEIGHT, width = WIDTH) {
  const x = (v) => LEFT + ((v - xDomain[0]) / (xDomain[1] - xDomain[0])) * (width - LEFT - RIGHT);
  const y = (v) => height - BOTTOM - ((v - yDomain[0]) / (yDomain[1] - yDomain[0])) * (height - TOP - BOTTOM);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}` });
  for (const v of ticks(...yDomain)) {
    svg.append(shape("path", { class: "grid", d: `M${LEFT} ${y(v)}H${width - RIGHT}` }));
    svg.append(shape("text", { x: LEFT - 4, y: y(v) + 3, "text-anchor": "end" }, tickLabel(v)));
  }
  for (const v of ticks(...xDomain, 5)) {
    svg.append(shape("text", { x: x(v), y: height - BOTTOM + 12, "text-anchor": "middle" }, tickLabel(v)));
  }
  if (yDomain[0] < 0 && yDomain[1] > 0) svg.append(shape("path", { class: "zero", d: `M${LEFT} ${y(0)}H${width - RIGHT}` }));
  svg.append(shape("path", { class: "axis", d: `M${LEFT} ${TOP}V${height - BOTTOM}H${width - RIGHT}` }));
  svg.append(shape("text", { x: (LEFT + width - RIGHT) / 2, y: height - 4, "text-anchor": "middle" }, xLabel));
  return { svg, x, y };
}

// `told`: a sentence with the main numbers, for whoever cannot see the drawing.
function figure(title, svg, keys, remark, told) {
  const found = element("figure", "", element("figcaption", "", title), svg);
  const line = element("p", "", ...keys.map(([name, kind]) => element("span", `key ${kind}`, name)));
  if (remark) line.append(remark);
  found.append(line);
  described(svg, `${title}. ${told}`);
  svg.append(shape("title", {}, title));
  return found;
}

// "0.10 at 0, 0.50 at 63": a line's first point and its last.
function ends(xs, ys) {
  const known = xs.map((x, i) => [x, ys[i]]).filter(([, y]) => Number.isFinite(y));
  if (!known.length) return "nothing to show";
  const [[a, first], [b, last]] = [known[0], known.at(-1)];
  const short = (y) => Number.isInteger(y) ? tickLabel(y) : number(y, 2);
  return `${short(first)} at ${tickLabel(a)}, ${short(last)} at ${tickLabel(b)}`;
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
  const told = series.map((s) => `${s.name}: ${ends(s.x, s.y)}`).join("; ");
  return figure(title, svg, series.map((s) => [s.name, s.kind]), remark, `${told}.`);
}

// What was found (y, with its interval) against what the critic predicted (x), bin by bin.
// rows: {x, y, low, high, size, told}, columns of equal length; `names`: of y, and of the diagonal.
function calibrationChart(title, rows, names, remark) {
  const both = extent([...rows.x, ...rows.y, ...rows.low, ...rows.high].filter((v) => v !== null));
  const { svg, x, y } = axes(both, both, "value that the critic predicted");
  svg.append(shape("path", { class: "line c dashed", d: `M${x(both[0])} ${y(both[0])}L${x(both[1])} ${y(both[1])}` }));
  const most = Math.max(...rows.size);
  rows.x.forEach((v, i) => {
    const [low, high] = [rows.low[i], rows.high[i]];
    if (low !== null) svg.append(shape("path", { class: "line a", d: `M${x(v)} ${y(low)}V${y(high)}` }));
    const told = `value ${number(v)}, ${names[0]} ${number(rows.y[i])} [${number(low)}, ${number(high)}]; ${rows.told[i]}`;
    const r = 2 + 4 * Math.sqrt(rows.size[i] / most);
    svg.append(shape("circle", { class: "dot a", cx: x(v), cy: y(rows.y[i]), r }, shape("title", {}, told)));
  });
  const last = rows.x.length - 1;
  const bins = [0, last].slice(0, last + 1).map(
    (i) => `where the critic predicted ${number(rows.x[i], 2)}, ${names[0]} was ${number(rows.y[i], 2)}`);
  return figure(title, svg, [[names[0], "a"], [names[1], "c"]], remark, `${last + 1} bins: ${bins.join("; ")}.`);
}

function returnCalibration(rows) {
  return calibrationChart("Calibration of the value", {
    x: rows.value_mean, y: rows.return_mean, low: rows.return_ci_low, high: rows.return_ci_high,
    size: rows.num_tokens,
    told: rows.num_tokens.map((n, i) => `${n} tokens, ${rows.num_prompts[i]} prompts`),
  }, ["return achieved", "where a perfect critic's would lie"],
  "A dot: the tokens of one range of values; the larger, the more. Bars: 95 % intervals, with a prompt as one draw, " +
  "which end with the lowest and the highest return. " +
  "Below the line the critic was too optimistic, above it too pessimistic.");
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
  const sum = (column) => column.reduce((a, b) => a + b, 0);
  const right = sum(rows.num_correct_tokens), all = sum(rows.num_tokens);
  const told = `${all} tokens with values from ${number(rows.low[0], 2)} to ${number(rows.high.at(-1), 2)}: ` +
    `${right} of right answers, ${all - right} of wrong ones.`;
  return figure("Tokens by predicted value", svg,
    [["tokens of right answers", "a"], ["tokens of wrong answers", "b"]],
    "A critic that tells them apart has the one colour at the right and the other at the left.", told);
}

function drawCharts(place, positions, calibration) {
  const at = positions.position, where = "token position in the response";
  const band = (name) => [-1, 1].map((sign) => positions[`${name}_mean`].map((m, i) => m + sign * positions[`${name}_std`][i]));
  const add = (node) => place.append(node);
  if (positions.value_mean) {
    add(lineChart("Mean value, and what was achieved", where, [
      { name: "value: what the critic predicts", kind: "a", x: at, y: positions.value_mean, band: band("value") },
      { name: "return: what the responses earned", kind: "b", dashed: true, x: at, y: positions.return_mean },
    ], "Shading: one standard deviation of the value. Lines that lie apart: a biased critic."));
    add(lineChart("Explained variance of the return", where,
      [{ name: "share of the returns' differences that the value explains", kind: "a", x: at, y: positions.explained_variance }],
      "1: a perfect critic; 0: no better than a constant; below 0: worse than one."));
  }
  if (positions.advantage_mean) {
    add(lineChart("Mean advantage, before whitening", where,
      [{ name: "advantage", kind: "a", x: at, y: positions.advantage_mean, band: band("advantage") }],
      "Shading: one standard deviation. Far from 0: tokens there are pushed whatever they say."));
  }
  if (calibration.value_mean) {
    add(returnCalibration(calibration));
    add(histogram(calibration));
  }
  if (at) {
    add(lineChart("Tokens at each position", where,
      [{ name: "tokens", kind: "a", x: at, y: positions.num_tokens }],
      "Where there are few, the means in the other charts are noisy."));
  }
}
