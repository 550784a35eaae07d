// Table of all allocations with search and sorting; only visible rows are in the DOM.

const ROW = 30;

function makeTable(timeline, chart) {
  const { data, count, sizes, births, deaths } = timeline;
  const box = byId("allocation-table");
  const columns = [
    ["size", "number", (i) => sizes[i], (i) => formatBytes(sizes[i])],
    ["category", "", (i) => timeline.names[timeline.category[i]]],
    ["module", "", (i) => moduleName(timeline.modules[timeline.module[i]])],
    ["op", "", (i) => timeline.ops[timeline.op[i]].replace(/^aten\.|\.default$/g, "")],
    ["phase", "", (i) => timeline.phaseAt(births[i])],
    ["born", "number", (i) => births[i], (i) => formatCount(births[i])],
    ["freed", "number", (i) => deaths[i],
      (i) => (deaths[i] === Infinity ? "kept" : formatCount(deaths[i]))],
  ];
  let order = [], by = 0, downwards = true;

  const heads = columns.map(([name, kind], i) => make("th",
    { scope: "col", class: `${kind} ${name}`, "aria-sort": i ? null : "descending" },
    make("button", { type: "button", onclick: () => sortBy(i) }, name)));
  const body = make("tbody");
  const table = make("table", {}, make("thead", {}, make("tr", { "aria-rowindex": 1 }, ...heads)),
    body);
  box.append(table);

  // Words are matched against the few distinct names, not against every row.
  function matcher(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const has = (names) => words.map((word) =>
      names.map((name) => name.toLowerCase().includes(word)));
    const inModule = has(timeline.modules.map(moduleName)), inOp = has(timeline.ops);
    const inCategory = has(timeline.names), phases = data.phases.map(([name]) => name);
    const inPhase = has(phases);
    return (i) => words.every((_, w) => inModule[w][timeline.module[i]] ||
      inOp[w][timeline.op[i]] || inCategory[w][timeline.category[i]] ||
      inPhase[w][phases.indexOf(timeline.phaseAt(births[i]))]);
  }

  function search() {
    const matches = matcher(byId("search").value);
    const event = byId("only-alive").checked ? timeline.events[chart.chosen] : null;
    order = [];
    let total = 0;
    for (let i = 0; i < count; i++) {
      if ((event === null || timeline.isAlive(i, event)) && matches(i)) {
        order.push(i);
        total += sizes[i];
      }
    }
    const left = timeline.unlisted
      ? `; ${formatCount(timeline.unlisted)} smaller ones are not listed` : "";
    const held = event === null ? "" : `, ${formatBytes(total)}`;
    byId("found").textContent = `${formatCount(order.length)} allocations${held}${left}`;
    sort();
  }

  function sort() {
    const value = columns[by][2], sign = downwards ? -1 : 1;
    const keys = new Map(order.map((i) => [i, value(i)]));
    const compare = typeof keys.get(order[0]) === "string"
      ? (a, b) => (keys.get(a) < keys.get(b) ? -1 : keys.get(a) > keys.get(b) ? 1 : 0)
      : (a, b) => (keys.get(a) === keys.get(b) ? 0 : keys.get(a) - keys.get(b));
    order.sort((a, b) => sign * compare(a, b) || a - b);
    box.scrollTop = 0;
    redraw(true);
  }

  function sortBy(column) {
    downwards = column === by ? !downwards : columns[column][1] === "number";
    by = column;
    heads.forEach((head, i) => {
      if (i === by) head.setAttribute("aria-sort", downwards ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    sort();
  }

  const gap = (height) => {
    const cell = make("td", { colspan: columns.length });
    cell.style.height = `${height}px`;
    return make("tr", { class: "gap", "aria-hidden": "true" }, cell);
  };

  let shown = -1;
  function redraw(always) {
    const room = Math.ceil((box.clientHeight || 420) / ROW) + 12;
    const first = bounded(Math.floor(box.scrollTop / ROW) - 6, 0, Math.max(order.length - 1, 0));
    if (!always && first === shown) return;
    shown = first;
    const last = Math.min(first + room, order.length);
    const rows = order.slice(first, last).map((i, at) => make("tr",
      { "aria-rowindex": first + at + 2 },
      ...columns.map(([name, kind, value, text], column) => {
        const words = (text || value)(i);
        const cell = make(column ? "td" : "th", { class: `${kind} ${name}`, title: words,
          scope: column ? null : "row" });
        const jumps = name === "born";
        cell.append(jumps ? make("button", { type: "button", "aria-label": `Show event ${words}`,
          onclick: () => chart.choose(timeline.sampleAt(births[i])) }, words) : words);
        return cell;
      })));
    table.setAttribute("aria-rowcount", order.length + 1);
    body.replaceChildren(gap(first * ROW), ...rows, gap((order.length - last) * ROW));
  }

  box.addEventListener("scroll", () => redraw(false), { passive: true });
  byId("search").addEventListener("input", search);
  byId("only-alive").addEventListener("change", search);
  search();
  return { momentChanged() { if (byId("only-alive").checked) search(); } };
}
