// Responses as coloured tokens. Long ones are cut in chunks that are built when they are in view.

const CHUNK_TOKENS = 400;
const SPARK_POINTS = 240;

function decoded(base64, Kind) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Kind(bytes.buffer);
}

class Response {
  constructor(data, page) {
    this.data = data;
    this.page = page;
    this.cache = new Map();
    this.texts = new Map(data.in_context);
  }
  get ids() {
    this.idList ??= decoded(this.data.ids, Int32Array);
    return this.idList;
  }
  numbers(name) {  // null: the page lacks them, or none of them is known
    const packed = this.data.columns[name];
    if (packed === undefined || packed === null) return null;
    if (!this.cache.has(name)) {
      const column = typeof packed === "number"
        ? new Float32Array(this.ids.length).fill(packed) : decoded(packed, Float32Array);
      this.cache.set(name, column);
    }
    return this.cache.get(name);
  }
  turn(i) {  // the number of token i's turn; null: no episode
    const { turns } = this.data;
    return turns ? turns.findLastIndex((turn) => turn.at <= i) : null;
  }
  text(i) {
    return this.texts.get(i) ?? this.page.tokens[this.ids[i]];
  }
}

// Where a number lies on the measure's scale: [strength 0 to 1, is negative], or null.
function strength(x, measure) {
  if (!Number.isFinite(x)) return null;
  const [low, high] = measure.domain;
  if (measure.scale === "diverging") return [Math.min(1, Math.abs(x) / (high || 1)), x < 0];
  const t = Math.min(1, Math.max(0, (x - low) / (high - low || 1)));
  return [measure.strong === "low" ? 1 - t : t, false];
}

class TokenView {
  constructor(response, state) {
    this.response = response;
    this.state = state;
    this.chunks = [];
    this.node = element("div", "tokens");
    this.node.tabIndex = 0;
    this.node.setAttribute("role", "group");
    this.node.setAttribute("aria-label", "tokens of the response: arrow keys move from one to the next");
    for (let from = 0; from < response.ids.length; from += CHUNK_TOKENS) {
      const chunk = element("div", "chunk");
      chunk.owner = this;
      chunk.from = from;
      chunk.to = Math.min(from + CHUNK_TOKENS, response.ids.length);
      chunk.style.minHeight = `${Math.ceil((chunk.to - from) / 16) * 1.75}em`;  // a guess, until it is built
      this.chunks.push(chunk);
    }
    this.node.append(...this.chunks);
  }
  show(chunk) {
    if (!chunk.spans) this.build(chunk);
    if (chunk.painted !== this.state.measure) this.paint(chunk);
  }
  build(chunk) {
    const { special, partial } = this.state;
    const starts = new Map((this.response.data.turns ?? []).map((turn, k) => [turn.at, k]));
    const nodes = [];
    chunk.spans = [];
    for (let i = chunk.from; i < chunk.to; i++) {
      const id = this.response.ids[i];
      const span = element("span", "t", this.response.text(i));
      if (special.has(id)) span.classList.add("special");
      if (partial[id]) span.classList.add("partial");
      span.place = i;
      chunk.spans.push(span);
      if (starts.has(i)) nodes.push(turnHead(this.response.data.turns, starts.get(i)));
      nodes.push(span);
    }
    chunk.style.minHeight = "";
    chunk.append(...nodes);
  }
  paint(chunk) {
    const measure = this.state.measure, numbers = this.response.numbers(measure.name);
    for (const span of chunk.spans) {
      const found = numbers ? strength(numbers[span.place], measure) : null;
      span.classList.toggle("none", !found);
      span.classList.toggle("n", Boolean(found && found[1]));
      span.style.setProperty("--x", found ? found[0].toFixed(2) : 0);
    }
    chunk.painted = measure;
  }
  span(i) {
    const chunk = this.chunks[Math.floor(i / CHUNK_TOKENS)];
    this.show(chunk);
    return chunk.spans[i - chunk.from];
  }
  spark() {
    const { measure } = this.state, numbers = this.response.numbers(measure.name);
    const svg = shape("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none" });
    described(svg, `${measure.label} along the response: ${course(numbers)}`);
    if (!numbers) return svg;
    const [low, high] = measure.domain, count = numbers.length;
    const bins = Math.min(count, SPARK_POINTS), lines = [[]];
    const y = (v) => 19 - 18 * Math.min(1, Math.max(0, (v - low) / (high - low || 1)));
    for (let b = 0; b < bins; b++) {
      const from = Math.floor((b * count) / bins), to = Math.max(from + 1, Math.floor(((b + 1) * count) / bins));
      const known = numbers.slice(from, to).filter(Number.isFinite);
      if (known.length) lines.at(-1).push([bins > 1 ? (b / (bins - 1)) * 100 : 50, y(mean(known))]);
      else if (lines.at(-1).length) lines.push([]);  // a gap: tokens without a number
    }
    for (const { at } of this.response.data.turns?.slice(1) ?? []) {
      const x = count > 1 ? (at / (count - 1)) * 100 : 50;
      svg.append(shape("path", { class: "turn", d: `M${x} 0V20`, "vector-effect": "non-scaling-stroke" }));
    }
    if (low < 0 && high > 0) svg.append(shape("path", { class: "zero", d: `M0 ${y(0)}H100`, "vector-effect": "non-scaling-stroke" }));
    for (const points of lines.filter((line) => line.length)) {
      if (points.length === 1) points.push([points[0][0] + 1, points[0][1]]);
      svg.append(shape("path", { class: "line a", d: `M${points.map((p) => p.join(" ")).join("L")}` }));
    }
    return svg;
  }
}

// What stands before a turn's tokens: its number and reward, and what the environment wrote.
function turnHead(turns, k) {
  const { reward, num_observed, observed } = turns[k];
  const head = element("div", "turn", element("span", "", `turn ${k + 1}, reward ${signed(reward, 2)}`));
  if (num_observed) {
    const wrote = element("span", "observed", observed);
    wrote.title = `${num_observed} tokens of the environment: not sampled, without value and loss`;
    head.append(wrote);
  }
  return head;
}

// A sentence for who cannot see the line.
function course(numbers) {
  const known = numbers ? [...numbers].filter(Number.isFinite) : [];
  if (!known.length) return "no token has this number.";
  const least = extreme(known, Math.min), most = extreme(known, Math.max);
  const places = [["lowest", least], ["highest", most]].map(
    ([name, x]) => `${name} ${number(x)} at token ${numbers.indexOf(x)}`);
  const gaps = numbers.length - known.length;
  return `first ${number(known[0])}, last ${number(known.at(-1))}, ${places.join(", ")}` +
    `${gaps ? `; ${gaps} of ${numbers.length} tokens have no number` : ""}.`;
}

// Of many numbers: Math.min(...numbers) has a limit to how many.
function extreme(numbers, choose) {
  return numbers.reduce((a, b) => choose(a, b));
}

// The numbers of one token, for the bar at the foot of the page.
function tokenDetails(response, i, state) {
  const id = response.ids[i], partial = state.partial[id];
  const list = element("dl");
  const add = (name, text, isCurrent = false) => {
    list.append(element("div", isCurrent ? "current" : "", element("dt", "", name), element("dd", "", text)));
  };
  const text = element("span", "text", `\u201c${response.text(i).replaceAll("\n", "")}\u201d`);
  list.append(element("div", "", element("dt", "", "token"), element("dd", "", text)));
  add("id", String(id));
  if (partial) add("bytes", partial);
  add("position", `${i} of ${response.data.num_tokens}`);
  const turn = response.turn(i);
  if (turn !== null) {
    add("turn", `${turn + 1} of ${response.data.num_turns}`);
    add("reward of the turn", signed(response.data.turns[turn].reward, 4));
  }
  for (const name of Object.keys(response.data.columns)) {
    const x = response.numbers(name)?.[i];
    const ratio = name === "engine_gap" ? ` (ratio ${number(Math.exp(x), 4)})` : "";
    add(state.label(name), number(x, 4) + ratio, name === state.measure.name);
  }
  const lambda = response.data.lambda_policy;
  if (lambda !== null) add("lambda of the policy", number(lambda, 4));
  return list;
}
