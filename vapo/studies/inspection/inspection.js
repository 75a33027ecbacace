// What `vapo inspect` says above the cards: numbers at a glance, verdicts, figures, and the course
// over steps or files. `drawReport` is called by page.js.

const SEVERITIES = { wrong: "\u2717", note: "\u2022", good: "\u2713" };

function tile({ label, value, detail }) {
  return element("div", "tile", element("span", "label", label), element("span", "value", value),
    element("span", "detail", detail));
}

function remark({ severity, title, text, advice, row }) {
  const mark = element("span", "mark", SEVERITIES[severity]);
  mark.setAttribute("aria-label", severity);
  const head = element("h3", "", mark, ` ${title}`);
  const parts = [head, element("p", "", text)];
  if (advice) parts.push(element("p", "", element("strong", "", "What to do: "), advice));
  parts.push(element("p", "where", `See ${row}.`));
  return element("li", severity, ...parts);
}

function table({ title, head, rows, remark }) {
  const cells = (tag, row) => element("tr", "", ...row.map((text) => element(tag, "", text)));
  const body = element("table", "", element("thead", "", cells("th", head)),
    element("tbody", "", ...rows.map((row) => cells("td", row))));
  const found = element("details", "figures", element("summary", "", title), element("div", "wide", body));
  if (remark) found.append(element("p", "where", remark));
  return found;
}

function drawReport(report) {
  const place = byId("report");
  if (report.tiles.length) place.append(element("div", "tiles", ...report.tiles.map(tile)));
  place.append(element("ul", "remarks", ...report.remarks.map(remark)));
  place.append(...report.tables.map(table));
  if (report.course.length) {
    const charts = element("div", "charts", ...report.course.map(drawn));
    place.append(element("h2", "", report.course_title), charts);
  }
  byId("charts").append(...report.charts.map(drawn));
}

function drawn({ title, x_label, series, remark }) {
  return lineChart(title, x_label, series, remark);
}
