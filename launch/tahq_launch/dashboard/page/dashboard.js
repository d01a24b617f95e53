// Draws the messages of /events (run_feed.py). Everything from a run's files is inserted as text.
"use strict";

const MOST_EVENTS = 300; // shown; a longer list would only slow the page
const STATES = { lost: "bad", warning: "bad", returned: "good" };

let steps = []; // [step, loss, tokens/s, validation loss]
let events = [];
let view = null;
let isDue = false;

const byId = (id) => document.getElementById(id);

/** An element with a class and children, which are elements or text. */
function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function drawing(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A bar of parts, each [class, share]; beyond 1 together they are made to fit. */
function bar(className, parts) {
  const total = Math.max(1, parts.reduce((sum, [, share]) => sum + share, 0));
  const made = element("div", `bar ${className}`);
  made.setAttribute("aria-hidden", "true"); // the numbers stand beside it
  for (const [name, share] of parts) {
    const part = element("span", name);
    part.style.width = `${(100 * share) / total}%`;
    made.append(part);
  }
  return made;
}

function badge(state) {
  return element("span", `badge ${state === "ok" ? "good" : state === "closed" ? "" : "bad"}`, state);
}

// -- the pipeline ---------------------------------------------------------------------------------

function linkRow(link) {
  const ends = `${link.from} → ${link.to} ${link.carries}`;
  const row = element("div", "link", element("p", "", element("strong", "", ends), " ", badge(link.state)));
  row.append(bar("", [["", Math.min(1, link.use)]]));
  row.append(element("p", "", `use ${link.use_text}, ${link.rate}`), element("p", "note", link.codec));
  return row;
}

function drawPipeline() {
  const rows = [];
  const drawn = new Set();
  for (const stage of view.stages) {
    const isAway = stage.state !== "ok" && stage.state !== "";
    const box = element("li", `stage${isAway ? " bad" : ""}`, element("strong", "", `Stage ${stage.stage}`), " ");
    if (stage.state) box.append(badge(stage.state));
    box.append(element("p", "note", stage.worker));
    rows.push(box);
    const next = stage.stage + 1;
    const links = view.links.filter(
      (link) => Math.min(link.from, link.to) === stage.stage && Math.max(link.from, link.to) === next
        && link.carries !== "all-reduce",
    );
    for (const link of links) drawn.add(link);
    if (links.length) rows.push(element("li", "cut", ...links.map(linkRow)));
  }
  byId("pipeline").replaceChildren(...rows);
  const others = view.links.filter((link) => !drawn.has(link));
  byId("others-title").hidden = !others.length;
  byId("others").replaceChildren(...others.map((link) => element("li", "", linkRow(link))));
}

function drawStages() {
  const rows = view.stages.map((stage) => {
    const row = element("li", "", element("strong", "", `Stage ${stage.stage}`));
    if (!stage.parts) return row;
    row.append(bar("split", stage.parts.map(([, share], index) => [`part${index}`, share])));
    const parts = stage.parts.map(([name, , text], index) => element("li", `part${index}`, `${name} ${text}`));
    row.append(element("ul", "parts", ...parts));
    if (stage.beside) row.append(element("p", "note", `on other threads: ${stage.beside}`));
    row.append(element("p", "", `memory ${stage.memory}`), bar("", [["", Math.min(1, stage.memory_share)]]));
    return row;
  });
  byId("stages").replaceChildren(...rows);
}

function drawFigures() {
  const rows = Object.entries(view.figures);
  byId("figures").replaceChildren(
    ...rows.map(([name, value]) => element("div", "", element("dt", "", name), element("dd", "", value))),
  );
  document.title = `${view.name}: ${view.state}`;
  byId("name").textContent = view.name;
  if (byId("state").textContent !== view.state) byId("state").textContent = view.state;
  byId("state").className = view.has_trouble ? "bad" : "";
  byId("problem").textContent = view.problem;
  byId("steps").textContent = `step ${view.step} of ${view.total_steps}`;
  byId("progress").max = Math.max(1, view.total_steps);
  byId("progress").value = view.step;
  byId("limit").textContent = view.limit;
}

function drawEvents() {
  const rows = events.slice(-MOST_EVENTS).reverse().map((event) => {
    const when = new Date(1000 * event.time);
    const time = element("time", "", when.toLocaleString("sv"));
    time.dateTime = when.toISOString();
    const kind = element("strong", STATES[event.event] || "", event.event);
    return element("li", "", time, ` step ${event.step} `, kind, ` ${event.text}`);
  });
  byId("events").replaceChildren(...rows);
}

// -- charts ---------------------------------------------------------------------------------------

const short = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(4));

/** Of the points of a pixel's column the first, least, largest and last: the line looks the same. */
function decimated(points) {
  const columns = new Map();
  for (const point of points) {
    const column = columns.get(Math.round(point[0]));
    if (column) column.push(point);
    else columns.set(Math.round(point[0]), [point]);
  }
  return [...columns.values()].flatMap((column) => {
    if (column.length <= 4) return column;
    const byHeight = [...column].sort((a, b) => a[1] - b[1]);
    const kept = new Set([column[0], byHeight[0], byHeight.at(-1), column.at(-1)]);
    return column.filter((point) => kept.has(point));
  });
}

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** A chart of columns of `steps`: [name, index, whether it is dashed with dots]. */
function drawChart(id, unit, series) {
  const figure = byId(id);
  const [width, height, left, right, top, bottom] = [figure.clientWidth, 208, 58, 8, 8, 22];
  const shown = series.map(([name, column, isSparse]) => {
    const rows = steps.filter((step) => step[column] !== null);
    return { name, isSparse, rows: rows.map((step) => [step[0], step[column]]) };
  });
  const values = shown.flatMap(({ rows }) => rows.map(([, value]) => value));
  if (!values.length || width < 100) {
    figure.replaceChildren(element("figcaption", "", "no step yet"));
    return;
  }
  const least = values.reduce((a, b) => Math.min(a, b));
  const most = values.reduce((a, b) => Math.max(a, b));
  const [first, last] = [steps[0][0], Math.max(steps.at(-1)[0], steps[0][0] + 1)];
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const y = (value) => height - bottom - ((value - least) / (most - least || 1)) * (height - top - bottom);
  const image = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const share of [0, 0.5, 1]) {
    const value = least + share * (most - least);
    image.append(drawing("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    image.append(drawing("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    const step = Math.round(first + share * (last - first));
    const anchor = ["start", "middle", "end"][2 * share];
    image.append(drawing("text", { x: x(step), y: height - 4, "text-anchor": anchor }, `${share ? "" : "step "}${step}`));
  }
  for (const { rows, isSparse } of shown) {
    const points = decimated(rows.map(([step, value]) => [x(step), y(value)]));
    image.append(drawing("path", { class: isSparse ? "line second" : "line", d: path(points) }));
    const dots = isSparse && points.length <= 60 ? points : [];
    image.append(...dots.map(([cx, cy]) => drawing("circle", { class: "dot", cx, cy, r: 2.5 })));
  }
  const here = drawing("line", { class: "here", y1: top, y2: height - bottom, visibility: "hidden" });
  image.append(here);
  /** The values at a step, or the newest. */
  const words = (limit) => shown.filter(({ rows }) => rows.length).map(({ name, rows }) => {
    const [step, value] = rows.findLast((row) => row[0] <= limit) || rows[0];
    return `${name} ${short(value)} ${unit} at step ${step}`;
  }).join(", ");
  const caption = element("figcaption", "", words(last));
  image.setAttribute("aria-label", `${words(last)}; from ${short(least)} to ${short(most)}`);
  image.addEventListener("pointermove", (event) => {
    const inside = (event.offsetX - left) / (width - left - right);
    const step = Math.round(first + Math.min(1, Math.max(0, inside)) * (last - first));
    for (const end of ["x1", "x2"]) here.setAttribute(end, x(step));
    here.setAttribute("visibility", "visible");
    caption.textContent = words(step);
  });
  image.addEventListener("pointerleave", () => {
    here.setAttribute("visibility", "hidden");
    caption.textContent = words(last);
  });
  figure.replaceChildren(image, caption);
}

function drawCharts() {
  drawChart("loss", "nats", [["loss", 1, false], ["validation (dashed)", 3, true]]);
  drawChart("speed", "tokens/s", [["speed", 2, false]]);
}

// -- messages -------------------------------------------------------------------------------------

/** Draw once for all messages that come within a frame. */
function draw() {
  isDue = false;
  if (!view) return;
  drawFigures();
  drawPipeline();
  drawStages();
  drawEvents();
  drawCharts();
}

function plan() {
  if (!isDue) requestAnimationFrame(draw);
  isDue = true;
}

const source = new EventSource(`events${location.search}`);
source.onopen = () => { byId("connection").textContent = ""; };
source.onerror = () => { byId("connection").textContent = "no connection to the dashboard's process; trying again"; };
source.onmessage = (message) => {
  const news = JSON.parse(message.data);
  if (news.anew) [steps, events] = [[], []];
  steps = steps.concat(news.steps);
  events = events.concat(news.events);
  view = news.view || view;
  if (view && view.is_over) {
    source.close();
    byId("connection").textContent = "The run is over; reload this page to look again.";
  }
  plan();
};
addEventListener("resize", plan);
