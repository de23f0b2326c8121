// The live page: receives the state of the job from /events and writes it into the page. All of it is data: it is set as
// text, and never becomes markup. Rows stay the same elements, and so keep their focus, selection and open details.
"use strict";

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

const count = (value) => (Math.abs(value) < 100 && value % 1 ? tenth : whole).format(value);
const percent = (share) => whole.format(100 * share) + " %";
const at = (seconds) => clock.format(new Date(1000 * seconds));

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return count(value) + " " + units[unit];
}

function duration(seconds) {
  if (seconds < 1e-3) return tenth.format(1e6 * seconds) + " µs";
  if (seconds < 1) return tenth.format(1e3 * seconds) + " ms";
  if (seconds < 120) return tenth.format(seconds) + " s";
  if (seconds < 7200) return whole.format(seconds / 60) + " min";
  return tenth.format(seconds / 3600) + " h";
}

function number(value) {
  if (typeof value === "string") return value;  // "nan", "inf"
  return value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) ? value.toExponential(3)
    : String(Number(value.toPrecision(4)));
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

// Elements for items, by key: existing ones are filled again, others are made or removed; in the items' order. Items with
// the same key are distinguished by their order.
function keyed(parent, items, key, create, fill) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const filled = new Map();
  const times = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const base = String(key(item));
    times.set(base, (times.get(base) ?? 0) + 1);
    const name = JSON.stringify([base, times.get(base)]);
    let element = known.get(name);
    if (!element) {
      element = create(item);
      element.dataset.key = name;
    }
    filled.set(name, element);
    fill(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const child of [...parent.children]) if (filled.get(child.dataset.key) !== child) child.remove();
}

// Tables. A column: heading, class of its cells, and a function that fills a cell and may return its text.
function table(id, columns, empty) {
  const holder = document.querySelector(`#${id} .table`);
  const title = document.querySelector(`#${id} h2`).textContent;
  const nothing = make("p", empty, "empty");
  const element = make("table");
  element.setAttribute("role", "table");
  element.setAttribute("aria-label", title);
  const head = element.createTHead();
  const row = head.insertRow();
  head.setAttribute("role", "rowgroup");
  row.setAttribute("role", "row");
  for (const [heading, name] of columns) {
    const cell = make("th", heading, name);
    cell.scope = "col";
    cell.setAttribute("role", "columnheader");
    row.append(cell);
  }
  const body = element.createTBody();
  body.setAttribute("role", "rowgroup");
  holder.append(nothing, element);

  function create() {
    const made = make("tr");
    made.setAttribute("role", "row");
    columns.forEach(([heading, name], index) => {
      const cell = make(index ? "td" : "th", undefined, name);
      if (index) cell.dataset.label = heading; else cell.scope = "row";
      cell.setAttribute("role", index ? "cell" : "rowheader");
      made.append(cell);
    });
    return made;
  }
  return (items, key) => {
    nothing.hidden = items.length > 0;
    element.hidden = !items.length;
    keyed(body, items, key, create, (made, item) => columns.forEach(([, , fill], index) => {
      const cell = made.cells[index];
      const text = fill(item, cell);
      if (text !== undefined) set(cell, text);
      if (index) cell.classList.toggle("empty-cell", !cell.textContent);
    }));
  };
}

function tagged(cell, text, tag) {
  if (cell.dataset.text === text + "\n" + tag) return;
  cell.dataset.text = text + "\n" + tag;
  cell.replaceChildren(text);
  if (tag) cell.append(make("span", tag, "tag"));
}

function state(row, cell) {
  cell.className = "state " + row.good;
  return row.state;
}

function share(row, cell) {
  if (!cell.firstChild) {
    const holder = make("div");
    const meter = make("meter");
    meter.setAttribute("aria-hidden", "true");
    holder.append(meter, make("span"));
    cell.append(holder);
  }
  const [meter, text] = cell.firstChild.children;
  meter.value = row.share;
  set(text, percent(row.share));
}

function story(row, cell) {
  const lines = row.story.filter((event, index) => index < 4)
    .map((event) => `${at(event.time)} ${event.text}`);
  if (row.deaths) lines.unshift(row.deaths === 1 ? "lost once" : `lost ${row.deaths} times`);
  if (cell.dataset.text === lines.join("\n")) return;
  cell.dataset.text = lines.join("\n");
  const holder = make("div");
  holder.append(...lines.map((line) => make("span", line)));
  cell.replaceChildren(...(lines.length ? [holder] : []));
}

const optional = (value, write) => (value === null || value === undefined ? "" : write(value));

const showWorkers = table("workers", [
  ["Worker", "", (row, cell) => { cell.title = row.name || row.address; tagged(cell, row.task, row.straggler ? "straggler" : ""); }],
  ["State", "state", state],
  ["Runs", "", (row) => row.runs && (row.quiet >= 5 ? `${row.runs}, for ${duration(row.quiet)}` : row.runs)],
  ["Functions/s", "number", (row) => count(row.rate)],
  ["Time each", "number", (row) => optional(row.seconds, duration)],
  ["Versus others", "number", (row) => optional(row.slower, (value) => `${tenth.format(value)} ×`)],
  ["Busy", "number", (row) => percent(row.busy)],
  ["Waiting for data", "number", (row) => percent(row.waited)],
  ["Done", "number", (row) => whole.format(row.done)],
  ["Memory", "number", (row) => optional(row.memory, bytes)],
  ["Up", "number", (row) => optional(row.up_seconds, duration)],
  ["History", "story", story],
], "No workers.");

const showReplicas = table("replicas", [
  ["Replica", "", (row) => whole.format(row.number)],
  ["Worker", "", (row) => row.task],
  ["Steps ahead of the slowest", "number", (row) => whole.format(row.staleness)],
  ["Waiting for others", "number", (row) => percent(row.waited)],
  ["Waited in all", "number", (row) => duration(row.wait_seconds)],
  ["Contributions dropped", "number", (row) => whole.format(row.dropped)],
], "No replicas.");

const showServers = table("servers", [
  ["Server", "", (row, cell) => { cell.title = row.name || row.address; tagged(cell, row.task, row.hot ? "hot" : ""); }],
  ["State", "state", (row, cell) => { cell.title = row.detail; return state(row, cell); }],
  ["Requests/s", "number", (row) => count(row.requests)],
  ["In/s", "number", (row) => bytes(row.bytes_in)],
  ["Out/s", "number", (row) => bytes(row.bytes_out)],
  ["Share of load", "share", share],
  ["Shards", "number", (row) => whole.format(row.shards)],
  ["Held", "number", (row) => bytes(row.held)],
  ["Memory", "number", (row) => optional(row.memory, bytes)],
  ["Up", "number", (row) => optional(row.up_seconds, duration)],
  ["History", "story", story],
], "No servers.");

const showVariables = table("variables", [
  ["Variable", "", (row, cell) => tagged(cell, row.name, row.hot ? "hot" : "")],
  ["Share of bytes", "share", share],
  ["Read/s", "number", (row) => bytes(row.read_bytes)],
  ["Written/s", "number", (row) => bytes(row.update_bytes)],
  ["Reads/s", "number", (row) => count(row.reads)],
  ["Updates/s", "number", (row) => count(row.updates)],
  ["Held", "number", (row) => bytes(row.held)],
  ["Servers", "", (row) => row.servers.map(([server, part]) => `${server} ${percent(part)}`).join(", ")],
], "No variables yet.");

const showTables = table("tables", [
  ["Table", "", (row) => row.name],
  ["Rows", "number", (row) => whole.format(row.rows)],
  ["Capacity", "number", (row) => (row.capacity === null ? "not set" : whole.format(row.capacity))],
  ["Held", "number", (row) => bytes(row.held)],
  ["Lookups/s", "number", (row) => count(row.read)],
  ["Hit rate", "number", (row) => optional(row.hit_rate, percent)],
  ["Admitted/s", "number", (row) => count(row.made)],
  ["Not admitted/s", "number", (row) => count(row.not_admitted)],
  ["Evicted/s", "number", (row) => count(row.evicted)],
], "No tables.");

const showCheckpoints = table("checkpoints", [
  ["Checkpoint", "", (row) => row.path],
  ["Saved at", "number", (row) => at(row.time)],
  ["Size", "number", (row) => bytes(row.nbytes)],
  ["Written in", "number", (row) => duration(row.seconds)],
  ["Functions paused for", "number", (row) => duration(row.pause_seconds)],
], "None saved by this coordinator.");

function showErrors(errors) {
  const holder = document.querySelector("#errors .list");
  keyed(holder, errors.length ? errors : [null], (error) => (error ? error.number : "none"), (error) => {
    if (!error) return make("p", "None.", "empty");
    const element = make(error.detailed ? "details" : "div");
    const head = make(error.detailed ? "summary" : "p");
    const when = make("time", at(error.time));
    when.dateTime = new Date(1000 * error.time).toISOString();
    head.append(when, " ", make("strong", error.who), " ", make("span", error.text));
    element.append(head);
    if (error.detailed) {
      const detail = make("pre", error.detail);
      element.append(detail);
      const load = async () => {
        const answer = detail.textContent ? null : await fetch(`/error/${error.number}`);
        if (answer && answer.ok) set(detail, await answer.text());
      };
      const tried = () => load().catch(() => {});  // opening it again retries
      element.addEventListener("toggle", tried);
      tried();
    }
    return element;
  }, (element, error) => {  // the last update of a job includes it: nothing can be fetched any more
    if (error && error.detail) set(element.querySelector("pre"), error.detail);
  });
}

function showEvents(events) {
  keyed(document.querySelector("#happened .list"), events, (event) => event.number, (event) => {
    const element = make("li");
    const when = make("time", at(event.time));
    when.dateTime = new Date(1000 * event.time).toISOString();
    const names = { down: "bad", error: "bad", up: "ok", retry: "warn" };
    element.append(when, make("strong", event.who), make("span", event.text, names[event.kind]));
    return element;
  }, () => {});
}

function showTiles(page) {
  const queue = page.queue;
  const moved = page.servers.reduce((sum, row) => sum + row.bytes_in + row.bytes_out, 0);
  const up = page.workers.filter((row) => row.good !== "bad").length;
  const tiles = [
    ["Functions/s", count(queue.rate), "", false],
    ...(page.training.step_rate === null ? [] : [["Steps/s", count(page.training.step_rate), "", false]]),
    ...(page.training.example_rate === null ? [] : [["Examples/s", count(page.training.example_rate), "", false]]),
    ["Workers up", `${up}`, `of ${page.workers.length}`, up < page.workers.length],
    ["Queued", whole.format(queue.waiting), "", false],
    ["With workers", whole.format(queue.running), "", false],
    ["Done", whole.format(queue.done), "", false],
    ["Failed", whole.format(queue.failed), `${whole.format(queue.retried)} run again`, queue.failed > 0],
    ["Bytes per second", bytes(moved), "", false],
    ...page.training.logs.map(([name, value]) => [name, number(value), "", typeof value === "string", "log"]),
    ["Running for", duration(page.running), "", false],
  ];
  keyed($("tiles"), tiles, ([name, , , , from]) => (from ? `${from}:${name}` : name), ([name]) => {
    const tile = make("div");
    const value = make("dd");
    value.append(make("span"), " ", make("small"));
    tile.append(make("dt", name), value);
    return tile;
  }, (tile, [, value, unit, bad]) => {
    set(tile.lastChild.firstChild, value);
    set(tile.lastChild.lastChild, unit);
    tile.classList.toggle("alarm", bad);
  });
  const { done, total, unit, label } = page.training;
  $("progress").hidden = !done;
  $("bar").hidden = !total;
  if (total) { $("bar").max = total; $("bar").value = done; }
  set($("bar-label"), [label, `${unit} ${whole.format(done)}${total ? " of " + whole.format(total) : ""}`]
    .filter(Boolean).join(", "));
}

// Charts
const charts = new Map();
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The range of an axis: from 0 for rates; around what there is for a loss, which may lie far from 0.
const fromZero = (_, low, high) => (low === null ? [0, 1] : [Math.min(0, low), high > 0 ? 1.08 * high : 1]);
const around = (_, low, high) => {
  if (low === null) return [0, 1];
  const margin = 0.08 * (high - low) || 0.08 * Math.abs(high) || 1;
  return [low - margin, high + margin];
};

function chart(id, data, write, range) {
  const holder = $(id);
  let known = charts.get(id);
  if (!known) {
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    known = new uPlot({
      width: holder.clientWidth, height: 190, legend: { show: false }, cursor: { drag: { x: false, y: false } },
      scales: { x: { time: true }, y: { range } },
      axes: [{ ...axis, values: (_, times) => times.map((time) => at(time)), space: 80, size: 28 },
        { ...axis, size: 56, values: (_, values) => values.map(write) }],
      series: [{}, { stroke: style("--accent"), width: 2, points: { show: false }, spanGaps: true }],
    }, data, holder);
    charts.set(id, known);
  } else {
    if (known.width !== holder.clientWidth) known.setSize({ width: holder.clientWidth, height: 190 });
    known.setData(data);
  }
}

function showCharts(page) {
  const { times, rates, losses, loss, loss_now } = page.series;
  if (times.length > 1) chart("rate-chart", [times, rates], count, fromZero);
  set($("rate-now"), times.length ? `now ${count(page.queue.rate)}` : "");
  const highest = Math.max(0, ...rates);
  $("rate-chart").setAttribute("aria-label",
    `Functions per second over time: now ${count(page.queue.rate)}, at most ${count(highest)}`);
  const known = losses.filter((value) => typeof value === "number");
  $("loss-figure").hidden = !known.length;
  if (known.length) {
    chart("loss-chart", [times, losses.map((value) => (typeof value === "number" ? value : null))], number, around);
    set($("loss-name"), loss);
    set($("loss-now"), `now ${number(loss_now)}`);
    $("loss-chart").setAttribute("aria-label",
      `${loss} over time: first ${number(known[0])}, now ${number(loss_now)}`);
  }
}

let last = null;

function title(state) {
  document.title = `${{ ok: "✓", warn: "!", bad: "✕", over: "■" }[state] || "○"} ${(last && last.job) || "pscluster"}`;
}

function show(page) {
  if (last && last.began !== page.began) {  // another job, with other event numbers
    location.reload();
    return;
  }
  last = page;
  const health = page.health;
  title(health.state);
  set($("job"), page.job);
  $("health").dataset.state = health.state;
  set($("verdict"), health.text);
  keyed($("problems"), health.problems, (text) => text.replace(/[\d.,]+/g, "#"), () => make("li"), set);
  set($("link"), `live, ${at(page.now)}`);
  showTiles(page);
  showCharts(page);
  showWorkers(page.workers, (row) => row.task);
  $("replicas").hidden = !page.replicas.length;
  showReplicas(page.replicas, (row) => `${row.number} ${row.task}`);
  showServers(page.servers, (row) => row.task);
  showVariables(page.variables, (row) => row.name);
  set($("more-variables"), page.more_variables ? `and ${whole.format(page.more_variables)} more with less traffic` : "");
  $("tables").hidden = !page.tables.length;
  showTables(page.tables, (row) => row.name);
  showErrors(page.errors);
  showEvents(page.events);
  showCheckpoints(page.checkpoints, (row) => row.path + row.time);
  set($("coordinator"), `${page.coordinator}, ${bytes(page.memory)} of memory`);
}

function lost() {
  const over = last && last.health.state === "over";
  set($("link"), last ? `not connected; last seen ${at(last.now)}` : "not connected");
  if (over) return;
  title("bad");
  $("health").dataset.state = "bad";
  set($("verdict"), "The coordinator does not answer; this is its last known state");
}

const source = new EventSource("/events");
source.onmessage = (message) => show(JSON.parse(message.data));
source.onerror = () => {  // it reconnects by itself unless refused: a new coordinator does not know the cookie
  lost();
  if (source.readyState === EventSource.CLOSED) setTimeout(again, 3000);
};

// Reload the page once a coordinator answers; keep the last state until then.
function again() {
  fetch("/", { method: "HEAD" }).then(() => location.reload(), () => setTimeout(again, 3000));
}

function redraw() {
  for (const [id, known] of charts) { known.destroy(); charts.delete(id); }
  if (last) showCharts(last);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => last && showCharts(last), 100); });
