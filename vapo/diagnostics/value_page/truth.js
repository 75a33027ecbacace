// The truth beside the critic: measured prefixes of a response, and charts of all of them.

const CARD_HEIGHT = 160, CARD_WIDTH = 900; // a measured response has a row of its own

// One range of values for all responses, so that their charts can be compared.
function truthDomain(page) {
  if (!page.truthDomain) {
    const prefixes = page.groups.flatMap((g) => g.responses).map((r) => r.truth).filter(Boolean);
    const value = page.measures.find((m) => m.name === "value");
    page.truthDomain = extent([...prefixes.flatMap((p) => [...p.low, ...p.high]), ...(value ? value.domain : [])]);
  }
  return page.truthDomain;
}

// The critic's value at each token, and the true values where they were measured: nothing is known
// between two of them, so no line joins them.
function truthChart(response, domain) {
  const prefixes = response.data.truth, values = response.numbers("value");
  const count = response.ids.length;
  const { svg, x, y } = axes([0, Math.max(1, count - 1)], domain, "token", CARD_HEIGHT, CARD_WIDTH);
  const inside = (v) => y(Math.min(domain[1], Math.max(domain[0], v)));
  for (const { at } of response.data.turns?.slice(1) ?? []) {
    svg.append(shape("path", { class: "grid", d: `M${x(at)} ${y(domain[0])}V${y(domain[1])}` }));
  }
  if (values) {
    const points = [...values].map((v, i) => `${x(i)} ${inside(v)}`);
    if (points.length === 1) points.push(`${x(1)} ${inside(values[0])}`);
    svg.append(shape("path", { class: "line a", d: `M${points.join("L")}` }));
  }
  prefixes.num_tokens.forEach((at, i) => {
    const [low, high, truth] = [prefixes.low[i], prefixes.high[i], prefixes.mean[i]];
    const value = prefixes.value[i];
    const told = `before token ${at}: true value ${number(truth, 2)} [${number(low, 2)}, ${number(high, 2)}], ` +
      `${prefixes.num_continuations[i]} continuations${value === null ? "" : `; the critic's ${number(value, 2)}`}`;
    svg.append(shape("path", { class: "line b", d: `M${x(at)} ${inside(low)}V${inside(high)}` }));
    svg.append(shape("circle", { class: "dot b", cx: x(at), cy: inside(truth), r: 2.6 }, shape("title", {}, told)));
  });
  const keys = [["true value where measured, with its 95 % interval", "b"]];
  if (values) keys.unshift(["value: what the critic predicts", "a"]);
  const told = truthSentence(prefixes);
  const found = figure("Value beside the truth", svg, keys, null, told);
  found.classList.add("truth");
  found.append(element("p", "", told));
  return found;
}

function truthSentence(prefixes) {
  const num = prefixes.mean.length, last = num - 1;
  let told = `${num} ${num === 1 ? "prefix" : "prefixes"} measured: true value ` +
    `${number(prefixes.mean[0], 2)} before token ${prefixes.num_tokens[0]}`;
  if (num > 1) {
    const falls = prefixes.mean.slice(1).map((v, i) => prefixes.mean[i] - v);
    const at = falls.indexOf(Math.max(...falls));
    told += `, ${number(prefixes.mean[last], 2)} before token ${prefixes.num_tokens[last]}`;
    if (falls[at] > 0) {
      const [from, to] = [prefixes.num_tokens[at], prefixes.num_tokens[at + 1]];
      told += `; the largest fall, ${number(prefixes.mean[at], 2)} to ${number(prefixes.mean[at + 1], 2)}, ` +
        `is over tokens ${from} to ${to - 1}`;
    }
  }
  const errors = prefixes.value.map((v, i) => v === null ? null : v - prefixes.mean[i]).filter((e) => e !== null);
  if (errors.length) told += `; the critic minus the truth is ${signed(mean(errors), 2)} on average`;
  return `${told}.`;
}

function drawTruth(place, truth) {
  const { calibration, positions } = truth;
  if (calibration.value_mean) {
    place.append(calibrationChart("Calibration against the truth", {
      x: calibration.value_mean, y: calibration.truth_mean,
      low: calibration.truth_ci_low, high: calibration.truth_ci_high,
      size: calibration.num_prefixes,
      told: calibration.num_prefixes.map((n, i) => `${n} prefixes, ${calibration.num_prompts[i]} prompts`),
    }, ["mean true value", "where a perfect critic's would lie"],
    "A dot: the measured prefixes of one range of values; the larger, the more. Bars: 95 % intervals, with a prompt " +
    "as one draw, which end with the lowest and the highest return. Below the line the critic was too optimistic, above it too pessimistic."));
  }
  if (positions.position?.length) {
    const at = positions.position, series = [];
    if (positions.value_mean.some((v) => v !== null)) {
      series.push({ name: "value: what the critic predicts", kind: "a", x: at, y: positions.value_mean });
    }
    series.push({ name: "true value, by continuations", kind: "b", dashed: true, x: at, y: positions.truth_mean });
    place.append(lineChart("Mean value against the truth", "share of the response that comes before", series,
      "Of the measured prefixes. Lines that lie apart: a biased critic."));
  }
}
