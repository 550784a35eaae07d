// Treemap of the memory alive at the chosen moment, by nested modules.

const MAP_HEIGHT = 420, HEAD = 20, DEPTH = 4;

function growTree(timeline, event, together) {
  const root = { name: "all", path: "", size: 0, children: new Map(), categories: new Map() };
  const paths = timeline.modules.map((path) => {
    const shown = together ? blockNumbersHidden(path) : path;
    return shown ? shown.split(".") : ["(outside the model)"];
  });
  const add = (node, size, category) => {
    node.size += size;
    node.categories.set(category, (node.categories.get(category) || 0) + size);
  };
  for (let i = 0; i < timeline.count; i++) {
    if (!timeline.isAlive(i, event)) continue;
    const size = timeline.sizes[i], category = timeline.category[i];
    let node = root;
    add(node, size, category);
    for (const part of paths[timeline.module[i]]) {
      let child = node.children.get(part);
      if (!child) {
        const path = node.path ? `${node.path}.${part}` : part;
        child = { name: part, path, size: 0, children: new Map(), categories: new Map() };
        node.children.set(part, child);
      }
      node = child;
      add(node, size, category);
    }
  }
  return root;
}

const mainCategory = (node) => [...node.categories].sort((a, b) => b[1] - a[1])[0][0];

// The only child of a module that has no memory beside it; else null.
function onlyChild(node) {
  const [only] = node.children.values();
  return node.children.size === 1 && only.size === node.size ? only : null;
}

// The parts of a module: its children and its own memory; chains of only children are merged.
function partsOf(node, timeline) {
  const parts = [...node.children.values()].map((child) => {
    let last = child, name = child.name;
    for (let only = onlyChild(last); only; only = onlyChild(last)) {
      last = only;
      name += `.${only.name}`;
    }
    return { node: last, name, size: last.size, category: mainCategory(last) };
  });
  const own = new Map(node.categories);
  for (const child of node.children.values()) {
    for (const [category, size] of child.categories) own.set(category, own.get(category) - size);
  }
  for (const [category, size] of own) {
    if (size > 0) parts.push({ node: null, name: timeline.names[category], size, category });
  }
  return parts.filter((part) => part.size > 0).sort((a, b) => b.size - a.size);
}

// Lays rectangles out in rows, each as square as possible.
function squarify(parts, x, y, width, height) {
  const total = parts.reduce((sum, part) => sum + part.size, 0);
  const scale = total ? (width * height) / total : 0;
  const placed = [];
  let rest = parts.filter((part) => part.size * scale >= 1);
  while (rest.length && width > 0.5 && height > 0.5) {
    const side = Math.min(width, height);
    const worst = (row, area) => Math.max(...row.map((part) => {
      const length = (part.size * scale * side) / area, depth = area / side;
      return Math.max(length / depth, depth / length);
    }));
    let row = [], area = 0;
    for (const part of rest) {
      const grown = [...row, part], more = area + part.size * scale;
      if (row.length && worst(grown, more) > worst(row, area)) break;
      row = grown;
      area = more;
    }
    const depth = area / side;
    let along = 0;
    for (const part of row) {
      const length = (part.size * scale) / depth;
      placed.push(width >= height
        ? { part, x, y: y + along, width: depth, height: length }
        : { part, x: x + along, y, width: length, height: depth });
      along += length;
    }
    if (width >= height) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
    rest = rest.slice(row.length);
  }
  return placed;
}

function makeTreemap(timeline) {
  const box = byId("treemap");
  const svg = draw("svg", { width: "100%", height: MAP_HEIGHT });
  box.append(svg);
  let event = timeline.data.peak, path = "", root, width = 0;

  function find(wanted) {
    let node = root;
    for (const part of wanted ? wanted.split(".") : []) {
      node = node.children.get(part);
      if (!node) return root;
    }
    return node;
  }

  // The nearest parent of the open module that has more than one part.
  function around() {
    const parts = path.split(".").slice(0, -1);
    while (parts.length && onlyChild(find(parts.join(".")))) parts.pop();
    return find(parts.join("."));
  }

  function open(node) {
    path = node.path;
    redraw();
    const first = svg.querySelector("[tabindex]");
    if (first) first.focus();
  }

  function label(text, x, y, room) {
    const most = Math.floor((room - 8) / 6.6);
    if (most < 4) return [];
    const shown = text.length > most ? `${text.slice(0, most - 1)}…` : text;
    return [draw("text", { x: x + 5, y: y + 14 }, shown)];
  }

  // A cell with its nested cells. Only outermost cells can have the keyboard focus; a click opens
  // the module that was hit.
  function cells({ part, x, y, width: w, height: h }, here, depth) {
    const inner = depth > 1 && part.node && w > 70 && h > 50 ? partsOf(part.node, timeline) : [];
    const nested = inner.length > 1
      ? squarify(inner, x + 2, y + HEAD, w - 5, h - HEAD - 3)
        .flatMap((one) => cells(one, here, depth - 1))
      : [];
    const text = `${part.name} ${formatBytes(part.size)}`;
    const name = `${text}, ${formatShare(part.size, here.size)}, mostly ` +
      timeline.names[part.category];
    const opens = part.node && (part.node.children.size > 0 || part.node.categories.size > 1);
    const access = depth === DEPTH
      ? { role: opens ? "button" : "img", "aria-label": name, tabindex: -1 }
      : { "aria-hidden": "true" };
    const group = draw("g", access, draw("title", {}, name),
      draw("rect", { x, y, width: Math.max(w - 1, 0.5), height: Math.max(h - 1, 0.5), rx: 2,
        class: nested.length ? "group" : "leaf", fill: timeline.colours[part.category] }),
      ...(h > 18 ? label(text, x, y, w) : []));
    if (opens) {
      group.classList.add("opens");
      group.addEventListener("click", () => open(part.node));
      group.addEventListener("keydown", (key) => {
        if (key.key === "Enter" || key.key === " ") {
          key.preventDefault();
          open(part.node);
        }
      });
    }
    return [group, ...nested];
  }

  function crumbs(here) {
    const parts = here.path ? here.path.split(".") : [];
    const links = ["all", ...parts].map((name, i) => {
      const to = parts.slice(0, i).join(".");
      if (i === parts.length) return make("span", { "aria-current": "true" }, name);
      return make("button", { type: "button", onclick: () => open(find(to)) }, name);
    });
    byId("crumbs").replaceChildren(...links, make("b", {}, formatBytes(here.size)));
  }

  function table(here) {
    const rows = partsOf(here, timeline).map((part) => make("tr", {},
      make("th", { scope: "row" }, part.name),
      make("td", { class: "number" }, make("data", { value: part.size }, formatBytes(part.size))),
      make("td", { class: "number" }, formatShare(part.size, here.size)),
      make("td", {}, timeline.names[part.category])));
    byId("module-table").replaceChildren(make("table", {},
      make("caption", {}, here.path ? `Inside ${here.path}` : "Inside the model and outside of it"),
      make("thead", {}, make("tr", {}, ...["module", "size", "share", "mostly"].map((name, i) =>
        make("th", { scope: "col", class: i === 1 || i === 2 ? "number" : "" }, name)))),
      make("tbody", {}, ...rows)));
  }

  function redraw() {
    width = box.clientWidth;
    const here = find(path);
    path = here.path;
    const placed = squarify(partsOf(here, timeline), 0, 0, width, MAP_HEIGHT);
    svg.replaceChildren(...placed.flatMap((one) => cells(one, here, DEPTH)));
    const first = svg.querySelector("[tabindex]");
    if (first) first.setAttribute("tabindex", 0);
    crumbs(here);
    table(here);
  }

  function show(at) {
    event = at;
    root = growTree(timeline, event, byId("together").checked);
    redraw();
  }

  // The treemap is one Tab stop; arrow keys move between cells, Backspace goes up.
  svg.addEventListener("keydown", (key) => {
    const stops = [...svg.querySelectorAll("[tabindex]")];
    const at = stops.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1,
      Home: 0, End: stops.length - 1 }[key.key];
    if (to !== undefined && stops[to]) {
      stops.forEach((one, i) => one.setAttribute("tabindex", i === to ? 0 : -1));
      stops[to].focus();
      key.preventDefault();
    } else if ((key.key === "Backspace" || key.key === "Escape") && path) {
      open(around());
      key.preventDefault();
    }
  });
  byId("together").addEventListener("change", () => {
    path = "";
    show(event);
  });
  new ResizeObserver(() => { if (root && box.clientWidth !== width) redraw(); }).observe(box);
  return { show };
}
