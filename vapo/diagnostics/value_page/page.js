// The page: header, choice of the colour, groups, and the token under the pointer.

const PAGE = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

const state = {
  measure: PAGE.measures[0],  // none: no token has a number
  special: new Set(PAGE.special),
  partial: PAGE.partial,
  labels: new Map([["truth", "true value"], ...PAGE.measures.map((m) => [m.name, m.label])]),
  label: (name) => state.labels.get(name) ?? name.replaceAll("_", " "),
};
const views = [], inView = new Set();
let chosen = null, pinned = false;

function describedList(place, facts) {
  for (const [name, text] of Object.entries(facts)) {
    place.append(element("div", "", element("dt", "", name), element("dd", "", text)));
  }
}

function card(data) {
  const response = new Response(data, PAGE);
  const view = new TokenView(response, state);
  const shown = response.ids.length;
  const ends = {
    length: "cut at the budget",
    turn_length: "a turn was cut",
    turns: "had all its turns",
  };
  const facts = {
    reward: signed(data.reward, 2),
    tokens: data.num_tokens.toLocaleString("en"),
    end: ends[data.finish_reason] ?? data.finish_reason,
  };
  if (data.turns) facts.turns = data.num_turns.toLocaleString("en");
  if (data.extracted !== null) facts.answer = data.extracted;
  if (data.failure) facts["verifier failed"] = data.failure;
  const values = response.numbers("value");
  if (values) facts["value first, mean, last"] =
    [values[0], mean(values), values[shown - 1]].map((x) => signed(x, 2)).join(", ");
  if (data.lambda_policy !== null) facts.lambda = number(data.lambda_policy);
  if (!data.carries_loss) facts.loss = "none: left out of the update";
  const list = element("dl");
  describedList(list, facts);
  const said = data.is_correct === null ? `reward ${signed(data.reward, 2)}`
    : data.is_correct ? "\u2713 right" : "\u2717 wrong";
  const head = element("header", "", element("span", "verdict", said), ` \u00b7 ${data.place ?? `row ${data.row}`}`, list);
  view.sparkNode = element("div", "spark");
  view.sparkNode.title = `${shown} tokens by the chosen measure; click to jump to a token`;
  view.sparkNode.addEventListener("click", (event) => {
    const box = view.sparkNode.getBoundingClientRect();
    const i = Math.round(((event.clientX - box.left) / box.width) * (shown - 1));
    choose(view, Math.max(0, Math.min(shown - 1, i)), true);
  });
  listen(view);
  views.push(view);
  const kind = data.is_correct === null ? "unjudged" : data.is_correct ? "right" : "";
  const node = element("article", kind, head, view.sparkNode, view.node);
  if (data.text) node.append(element("div", "tokens chunk", data.text));  // the tokens' texts are not known
  if (!shown) view.node.remove();
  if (data.truth) {
    node.classList.add("measured");
    head.after(truthChart(response, truthDomain(PAGE)));
  }
  if (shown < data.num_tokens) {
    node.append(element("div", "cut", `${data.num_tokens - shown} more tokens are not on this page${PAGE.report ? "" : " (value_pages.max_tokens)"}.`));
  }
  return node;
}

function listen(view) {
  const place = (event) => event.target.classList.contains("t") ? event.target.place : null;
  view.node.addEventListener("pointerover", (event) => {
    if (!pinned && event.pointerType === "mouse" && place(event) !== null) choose(view, place(event), false);
  });
  view.node.addEventListener("click", (event) => {
    if (place(event) === null) return;
    pinned = !(pinned && chosen && chosen.view === view && chosen.place === place(event));
    choose(view, place(event), false);
  });
  view.node.addEventListener("keydown", (event) => {
    const last = view.response.ids.length - 1;
    const at = chosen && chosen.view === view ? chosen.place : 0;
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 20, ArrowUp: at - 20, Home: 0, End: last };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    pinned = true;
    choose(view, Math.max(0, Math.min(last, moves[event.key])), true);
  });
  view.node.addEventListener("focus", () => {
    if (!chosen || chosen.view !== view) choose(view, 0, false);
  });
}

function choose(view, place, scroll) {
  chosen?.span.classList.remove("chosen");
  const span = view.span(place);
  span.classList.add("chosen");
  chosen = { view, place, span };
  if (scroll) span.scrollIntoView({ block: "nearest" });
  tell();
}

function tell() {
  if (!chosen) return byId("details").replaceChildren();
  byId("details").replaceChildren(tokenDetails(chosen.view.response, chosen.place, state));
  byId("hint").textContent = pinned ? "Pinned: press Escape or click the same token to unpin it." : "";
}

function colourBy(measure) {
  if (!measure) return;
  state.measure = measure;
  document.body.dataset.scale = measure.scale;
  document.body.dataset.strong = measure.strong;
  for (const button of byId("measures").children) {
    button.setAttribute("aria-pressed", String(button.measure === measure));
  }
  const [low, high] = measure.domain.map((end) => number(end, 2));
  byId("low").textContent = `${measure.low_means} \u2264 ${low}`;
  byId("high").textContent = `\u2265 ${high} ${measure.high_means}`;
  byId("ramp").setAttribute("aria-label", `colours from ${low} to ${high}`);
  byId("meaning").textContent = measure.doc;
  for (const chunk of inView) chunk.owner.show(chunk);
  for (const view of views) {
    view.sparkNode.hidden = Boolean(view.response.data.truth) && measure.name === "value";  // the chart has this line
    view.sparkNode.replaceChildren(view.spark());
  }
  tell();
}

function group(data) {
  const facts = element("dl");
  describedList(facts, {
    prompt: data.prompt_id,
    answer: data.answer || "\u2013",
    ...(data.num_correct === null ? {} : { right: `${data.num_correct} of ${data.num_responses}` }),
    shown: `${data.responses.length} of ${data.num_responses} responses`,
  });
  const prompt = element("details", "", element("summary", "", "Prompt"), element("div", "prompt", data.prompt));
  prompt.open = data.prompt.length < 1500;
  const measuredFirst = [...data.responses].sort((a, b) => Boolean(b.truth) - Boolean(a.truth));
  const cards = element("div", "cards", ...measuredFirst.map(card));
  if (data.responses.some((r) => r.num_tokens > 300)) cards.classList.add("long");
  return element("section", "", element("h2", "", `Group ${data.index}: ${data.reason}`), facts, prompt, cards);
}

function tellVerdict(truth) {
  byId("verdict").hidden = false;
  byId("measured").textContent = `Measured: ${truth.measured}. In brackets: 95 % intervals.`;
  byId("remarks").append(...truth.verdict.map(({ text, row }) =>
    element("li", "", text, " ", element("span", "where", `See ${row}.`))));
}

function start() {
  byId("title").textContent = PAGE.title;
  describedList(byId("facts"), PAGE.facts);
  byId("notes").append(...PAGE.notes.map((note) => element("li", "", note)));
  if (PAGE.truth) tellVerdict(PAGE.truth);
  if (PAGE.report) drawReport(PAGE.report);
  byId("controls").hidden = !PAGE.measures.length;
  drawCharts(byId("charts"), PAGE.positions, PAGE.calibration);
  if (PAGE.truth) drawTruth(byId("charts"), PAGE.truth);
  PAGE.measures.forEach((measure, i) => {
    const button = element("button", "", measure.label);
    button.type = "button";
    button.title = `${measure.doc} (key ${i + 1})`;
    button.measure = measure;
    button.addEventListener("click", () => colourBy(measure));
    byId("measures").append(button);
  });
  const groups = PAGE.groups.map(group);
  if (groups.length) groups.splice(1, 0, byId("overview"));  // a newcomer meets responses first
  byId("groups").append(...groups);
  colourBy(PAGE.measures.find((m) => `#${m.name}` === location.hash) ?? state.measure);
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) {
        inView.add(target);
        target.owner.show(target);
      } else inView.delete(target);
    }
  }, { rootMargin: "600px" });
  for (const view of views) for (const chunk of view.chunks) observer.observe(chunk);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { pinned = false; tell(); }
    const measure = PAGE.measures[Number(event.key) - 1];
    if (measure && !event.ctrlKey && !event.metaKey && !event.altKey) colourBy(measure);
  });
  document.body.dataset.ready = "true";
}

start();
